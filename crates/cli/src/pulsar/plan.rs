//! What a job needs at a Pulsar cluster: names, policies and rights, and why each is wanted. No IO.

use gradwire_control::{JobName, Topic};
use serde_json::{Value, json};

/// From how many bytes of backlog on a log its producers get an error, rather than its consumers a gap.
const LOG_BACKLOG_BYTES: u64 = 1 << 30;
/// After how many new bytes a topic with one record for each key is compacted.
const COMPACTION_BYTES: u64 = 16 << 20;
/// Taken only where idle topics do go.
const INACTIVE_S: u32 = 60;

/// The end of the name of the topic that `gradwire doctor` tries.
pub(crate) const DOCTOR: &str = "doctor";

/// How long and how much things are kept.
pub(super) struct Limits {
    pub(super) retention_days: u32,
    pub(super) retention_mb: u32,
    pub(super) ttl_s: u32,
}

/// Where a job's topics live.
#[derive(Clone, Debug)]
pub(super) struct Namespace {
    pub(super) tenant: String,
    pub(super) namespace: String,
}

impl Namespace {
    /// `tenant/namespace`.
    pub(super) fn path(&self) -> String {
        format!("{}/{}", self.tenant, self.namespace)
    }
}

/// One thing that is to have a value: how it is read, compared and set.
pub(super) struct Setting {
    pub(super) what: &'static str,
    /// The wanted value, for people.
    pub(super) shown: String,
    /// Where it is in what [`Setting::read`] gives.
    pub(super) pointer: &'static str,
    pub(super) wanted: Value,
    /// The path to read it at, behind that of the topic. Those of a namespace are all read at once.
    pub(super) read: &'static str,
    /// The path to set it at, behind that of the namespace or topic.
    pub(super) set: String,
    pub(super) body: Option<Value>,
}

impl Setting {
    /// Whether what is there is what is wanted: fields that are not asked for may have any value.
    pub(super) fn is_in(&self, found: &Value) -> bool {
        let Some(found) = found.pointer(self.pointer) else { return false };
        match self.wanted.as_object() {
            Some(fields) => fields.iter().all(|(name, value)| found.get(name) == Some(value)),
            None => *found == self.wanted,
        }
    }
}

/// One topic.
pub(super) struct PlannedTopic {
    pub(super) name: String,
    pub(super) settings: Vec<Setting>,
}

/// All that a job needs.
pub(super) struct Plan {
    pub(super) namespace: Namespace,
    pub(super) policies: Vec<Setting>,
    pub(super) topics: Vec<PlannedTopic>,
    /// They may produce and consume on each topic, and nothing else.
    pub(super) roles: Vec<String>,
}

/// What roles may do on the job's topics.
pub(super) const RIGHTS: [&str; 2] = ["produce", "consume"];

impl Plan {
    /// For a job.
    pub(super) fn new(namespace: Namespace, job: &JobName, roles: &[String], limits: &Limits) -> Self {
        let name = |kind: &str| format!("{job}-{kind}");
        let planned = |kind: &Topic| PlannedTopic { name: name(kind.suffix()), settings: of_topic(*kind, limits) };
        let mut topics: Vec<_> = Topic::ALL.iter().map(planned).collect();
        topics.push(PlannedTopic { name: name(DOCTOR), settings: of_work(limits) });
        Self { namespace, policies: of_namespace(limits), topics, roles: roles.to_vec() }
    }
}

fn of_namespace(limits: &Limits) -> Vec<Setting> {
    let policy = |what, shown: String, pointer, set: &str, wanted: Value| {
        let body = Some(wanted.clone());
        Setting { what, shown, pointer, wanted, read: "", set: set.to_owned(), body }
    };
    let Limits { retention_days: days, retention_mb, .. } = limits;
    let retention = json!({ "retentionTimeInMinutes": days * 24 * 60, "retentionSizeInMB": retention_mb });
    let auto = json!({ "allowAutoTopicCreation": true, "topicType": "non-partitioned" });
    let inactive = json!({
        "inactiveTopicDeleteMode": "delete_when_no_subscriptions",
        "maxInactiveDurationSeconds": INACTIVE_S,
        "deleteWhileInactive": false,
    });
    vec![
        policy("retention", format!("{days} days, {retention_mb} MB"), "/retention_policies", "retention", retention),
        // A producer's numbers start anew with its process: deduplication would drop what it sends then.
        policy("deduplication", "off".to_owned(), "/deduplicationEnabled", "deduplication", json!(false)),
        // Partitions would scatter a log.
        policy("new topics", "not partitioned".to_owned(), "/autoTopicCreationOverride", "autoTopicCreation", auto),
        policy(
            "schemas",
            "updated by producers".to_owned(),
            "/is_allow_auto_update_schema",
            "isAllowAutoUpdateSchema",
            json!(true),
        ),
        // A topic that goes while the job pauses takes its policies and rights along.
        policy("idle topics", "stay".to_owned(), "/inactive_topic_policies", "inactiveTopicPolicies", inactive),
    ]
}

fn of_topic(kind: Topic, limits: &Limits) -> Vec<Setting> {
    match kind {
        // Read from their first record on, however long the job runs. Retention first: a quota has to be below it.
        Topic::Control | Topic::Rounds | Topic::Audit => vec![retention("everything", -1, -1), backlog_quota()],
        Topic::Snapshots | Topic::Versions => vec![compaction()],
        Topic::Retransmit | Topic::Updates => of_work(limits),
        // Read without a subscription that would hold them.
        Topic::Copies => {
            let minutes = limits.ttl_s.div_ceil(60);
            vec![retention(&format!("{minutes} minutes"), minutes.into(), -1)]
        }
        Topic::Results => Vec::new(),
    }
}

/// Of topics whose messages are done with, or too late.
fn of_work(limits: &Limits) -> Vec<Setting> {
    let ttl = Setting {
        what: "time to live",
        shown: format!("{} s", limits.ttl_s),
        pointer: "",
        wanted: json!(limits.ttl_s),
        read: "messageTTL",
        set: format!("messageTTL?messageTTL={}", limits.ttl_s),
        body: None,
    };
    vec![retention("until acknowledged", 0, 0), ttl]
}

fn retention(shown: &str, minutes: i64, megabytes: i64) -> Setting {
    let wanted = json!({ "retentionTimeInMinutes": minutes, "retentionSizeInMB": megabytes });
    Setting {
        what: "retention",
        shown: shown.to_owned(),
        pointer: "",
        body: Some(wanted.clone()),
        wanted,
        read: "retention",
        set: "retention".to_owned(),
    }
}

fn compaction() -> Setting {
    Setting {
        what: "compaction",
        shown: format!("after {} MiB", COMPACTION_BYTES >> 20),
        pointer: "",
        wanted: json!(COMPACTION_BYTES),
        read: "compactionThreshold",
        set: "compactionThreshold".to_owned(),
        body: Some(json!(COMPACTION_BYTES)),
    }
}

fn backlog_quota() -> Setting {
    let quota = json!({ "limitSize": LOG_BACKLOG_BYTES, "policy": "producer_exception" });
    Setting {
        what: "backlog above 1 GiB",
        shown: "an error for producers".to_owned(),
        pointer: "/destination_storage",
        body: Some(json!({ "limitSize": LOG_BACKLOG_BYTES, "limitTime": -1, "policy": "producer_exception" })),
        wanted: quota,
        read: "backlogQuotaMap",
        set: "backlogQuota?backlogQuotaType=destination_storage".to_owned(),
    }
}

/// Checks the name of a tenant or namespace.
pub(super) fn parse_entity(text: &str) -> Result<String, String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-=:._".contains(c);
    if !text.is_empty() && text.len() <= 256 && text.chars().all(allowed) {
        return Ok(text.to_owned());
    }
    Err("expected letters, digits and any of - = : . _".to_owned())
}

/// A role's name as a part of a path.
pub(super) fn encoded(role: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
    role.bytes().map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        let namespace = Namespace { tenant: "t".to_owned(), namespace: "n".to_owned() };
        let limits = Limits { retention_days: 14, retention_mb: 10, ttl_s: 60 };
        Plan::new(namespace, &"job".parse().unwrap(), &[], &limits)
    }

    #[test]
    fn a_job_has_its_topics_and_each_setting_knows_itself() {
        let plan = plan();
        assert_eq!(plan.topics.len(), Topic::ALL.len() + 1);
        assert!(plan.topics.iter().all(|topic| topic.name.starts_with("job-")));
        for setting in plan.topics.iter().flat_map(|topic| &topic.settings).chain(&plan.policies) {
            assert!(!setting.is_in(&Value::Null), "{}", setting.what);
            let nested = match setting.pointer.strip_prefix('/') {
                Some(name) => json!({ name: setting.wanted }),
                None => setting.wanted.clone(),
            };
            assert!(setting.is_in(&nested), "{}", setting.what);
        }
    }

    #[test]
    fn other_values_are_not_the_wanted_ones_and_other_fields_do_not_matter() {
        let plan = plan();
        let retention = &plan.policies[0];
        let found = |minutes: u32| json!({ "retention_policies": { "retentionTimeInMinutes": minutes, "retentionSizeInMB": 10, "more": 1 } });
        assert!(retention.is_in(&found(14 * 24 * 60)));
        assert!(!retention.is_in(&found(1)));
    }

    #[test]
    fn names_and_roles_make_paths() {
        assert_eq!(encoded("spiffe://a/b c"), "spiffe%3A%2F%2Fa%2Fb%20c");
        assert_eq!(encoded("é"), "%C3%A9");
        assert!(parse_entity("a-b.c_d=e:f").is_ok());
        for bad in ["", "a/b", "a b", "é", "a?b", "%2f"] {
            assert!(parse_entity(bad).is_err(), "{bad}");
        }
    }
}
