//! Brings a cluster to what a plan wants. What is as wanted is left alone; each step is a row of the answer.

use std::fmt;

use serde_json::{Value, json};
use ureq::http::{Method, StatusCode};

use super::admin::{Admin, AdminError};
use super::plan::{Namespace, Plan, PlannedTopic, RIGHTS, Setting, encoded};

/// What became of one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Done {
    /// It was as wanted.
    Same,
    Created,
    /// It had another value, if any.
    Changed(Option<String>),
    /// A dry run would create it.
    WouldCreate,
    /// A dry run would change it, from this if anything.
    WouldChange(Option<String>),
}

impl fmt::Display for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Same => f.write_str("as it was"),
            Self::Created => f.write_str("created"),
            Self::Changed(None) => f.write_str("set"),
            Self::Changed(Some(before)) => write!(f, "set (was {before})"),
            Self::WouldCreate => f.write_str("would be created"),
            Self::WouldChange(None) => f.write_str("would be set"),
            Self::WouldChange(Some(before)) => write!(f, "would be set (is {before})"),
        }
    }
}

/// One step.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) what: String,
    pub(super) wanted: String,
    pub(super) result: Done,
}

/// How many steps did what, in words.
pub(super) fn summary(rows: &[Row]) -> String {
    let count = |wanted: fn(&Done) -> bool| rows.iter().filter(|row| wanted(&row.result)).count();
    let created = count(|done| matches!(done, Done::Created));
    let set = count(|done| matches!(done, Done::Changed(_)));
    let would = count(|done| matches!(done, Done::WouldCreate | Done::WouldChange(_)));
    let same = count(|done| *done == Done::Same);
    if would > 0 {
        return format!("nothing was changed: {would} would be created or set, {same} are as wanted");
    }
    format!("{created} created, {set} set, {same} as they were")
}

/// Does all of it, and writes down each step that was done.
pub(super) fn execute(admin: &Admin, plan: &Plan, dry_run: bool, rows: &mut Vec<Row>) -> Result<(), AdminError> {
    // The first call also sees whether this is Pulsar at all, and whether it takes the token.
    let clusters = admin.clusters()?;
    let mut setup = Setup { admin, dry_run, rows };
    let tenant = setup.tenant(&plan.namespace.tenant, &clusters)?;
    let namespace = setup.namespace(&plan.namespace, tenant)?;
    setup.policies(plan, namespace)?;
    let topics = if namespace { setup.existing_topics(&plan.namespace)? } else { Vec::new() };
    for topic in &plan.topics {
        let there = setup.topic(plan, topic, &topics)?;
        setup.topic_settings(plan, topic, there)?;
        setup.rights(plan, topic, there)?;
    }
    Ok(())
}

/// In a dry run, what is made by one step is not there for the next: then there is nothing to ask the cluster about.
struct Setup<'a> {
    admin: &'a Admin,
    dry_run: bool,
    rows: &'a mut Vec<Row>,
}

impl Setup<'_> {
    /// Each of these says whether its subject is there afterwards.
    fn tenant(&mut self, tenant: &str, clusters: &[String]) -> Result<bool, AdminError> {
        let what = format!("tenant {tenant}");
        let there = match self.admin.get(&format!("tenants/{tenant}"), &format!("look at {what}")) {
            Ok(found) => found.is_some(),
            // An administrator of the tenant may not look at it, but sees its namespaces.
            Err(AdminError::Forbidden { what, reason }) => {
                match self.admin.get(&format!("namespaces/{tenant}"), "list the namespaces") {
                    Ok(Some(_)) => true,
                    _ => return Err(AdminError::Forbidden { what, reason }),
                }
            }
            Err(error) => return Err(error),
        };
        let body = json!({ "adminRoles": [], "allowedClusters": clusters });
        self.create(what, clusters.join(", "), there, &format!("tenants/{tenant}"), Some(&body))
    }

    fn namespace(&mut self, namespace: &Namespace, tenant_is_there: bool) -> Result<bool, AdminError> {
        let (path, what) = (format!("namespaces/{}", namespace.path()), format!("namespace {}", namespace.path()));
        let there = tenant_is_there && self.admin.get(&path, &format!("look at {what}"))?.is_some();
        self.create(what, String::new(), there, &path, None)
    }

    fn policies(&mut self, plan: &Plan, namespace_is_there: bool) -> Result<(), AdminError> {
        let path = format!("namespaces/{}", plan.namespace.path());
        let found = match namespace_is_there {
            true => self.admin.get(&path, "read the namespace's policies")?.unwrap_or_default(),
            false => Value::Null,
        };
        plan.policies.iter().try_for_each(|policy| self.setting("namespace", &path, policy, &found))
    }

    /// Full names of the namespace's topics.
    fn existing_topics(&self, namespace: &Namespace) -> Result<Vec<String>, AdminError> {
        let path = namespace.path();
        let list = |path: &str| -> Result<Vec<String>, AdminError> {
            let names = self.admin.get(path, "list the namespace's topics")?.unwrap_or_default();
            let names = names.as_array().cloned().unwrap_or_default();
            Ok(names.iter().filter_map(Value::as_str).map(str::to_owned).collect())
        };
        let mut topics = list(&format!("persistent/{path}"))?;
        topics
            .extend(list(&format!("persistent/{path}/partitioned"))?.iter().map(|name| format!("{name}{PARTITIONED}")));
        Ok(topics)
    }

    fn topic(&mut self, plan: &Plan, topic: &PlannedTopic, existing: &[String]) -> Result<bool, AdminError> {
        let path = topic_path(plan, topic);
        let full = format!("persistent://{}/{}", plan.namespace.path(), topic.name);
        if existing.contains(&format!("{full}{PARTITIONED}")) {
            return Err(AdminError::Refused {
                what: format!("use topic {}", topic.name),
                status: StatusCode::CONFLICT,
                reason:
                    "it is partitioned, and that would scatter the job's records; delete it, or choose another job \
                         name"
                        .to_owned(),
            });
        }
        self.create(format!("topic {}", topic.name), String::new(), existing.contains(&full), &path, None)
    }

    fn topic_settings(&mut self, plan: &Plan, topic: &PlannedTopic, there: bool) -> Result<(), AdminError> {
        let path = topic_path(plan, topic);
        for setting in &topic.settings {
            let found = match there {
                true => {
                    let what = format!("read {} of {}", setting.what, topic.name);
                    self.admin.get(&format!("{path}/{}", setting.read), &what)?.unwrap_or_default()
                }
                false => Value::Null,
            };
            self.setting(&topic.name, &path, setting, &found)?;
        }
        Ok(())
    }

    fn rights(&mut self, plan: &Plan, topic: &PlannedTopic, there: bool) -> Result<(), AdminError> {
        if plan.roles.is_empty() {
            return Ok(());
        }
        let path = format!("{}/permissions", topic_path(plan, topic));
        let found = match there {
            true => self.admin.get(&path, &format!("read who may use {}", topic.name))?.unwrap_or_default(),
            false => Value::Null,
        };
        for role in &plan.roles {
            let has = |right: &str| found[role].as_array().is_some_and(|rights| rights.contains(&json!(right)));
            let done = if RIGHTS.iter().all(|right| has(right)) {
                Done::Same
            } else if self.dry_run {
                Done::WouldChange(None)
            } else {
                let path = format!("{path}/{}", encoded(role));
                let what = format!("let {role} use {}", topic.name);
                self.admin.change(Method::POST, &path, Some(&json!(RIGHTS)), &what)?;
                Done::Changed(None)
            };
            self.row(format!("{}: role {role}", topic.name), RIGHTS.join(", "), done);
        }
        Ok(())
    }

    fn create(
        &mut self,
        what: String,
        wanted: String,
        there: bool,
        path: &str,
        body: Option<&Value>,
    ) -> Result<bool, AdminError> {
        let done = if there {
            Done::Same
        } else if self.dry_run {
            Done::WouldCreate
        } else {
            match self.admin.change(Method::PUT, path, body, &format!("create {what}")) {
                // Somebody was faster.
                Err(AdminError::Refused { status: StatusCode::CONFLICT, .. }) => Done::Same,
                done => done.map(|()| Done::Created)?,
            }
        };
        let there = done != Done::WouldCreate;
        self.row(what, wanted, done);
        Ok(there)
    }

    fn setting(&mut self, of: &str, path: &str, setting: &Setting, found: &Value) -> Result<(), AdminError> {
        let before = || found.pointer(setting.pointer).filter(|value| !value.is_null()).map(shown);
        let done = if setting.is_in(found) {
            Done::Same
        } else if self.dry_run {
            Done::WouldChange(before())
        } else {
            let what = format!("set {} of {of}", setting.what);
            self.admin.change(Method::POST, &format!("{path}/{}", setting.set), setting.body.as_ref(), &what)?;
            Done::Changed(before())
        };
        self.row(format!("{of}: {}", setting.what), setting.shown.clone(), done);
        Ok(())
    }

    fn row(&mut self, what: String, wanted: String, result: Done) {
        self.rows.push(Row { what, wanted, result });
    }
}

/// Marks the names of partitioned topics in the list of existing ones. No topic's name has a blank.
const PARTITIONED: &str = " partitioned";

fn topic_path(plan: &Plan, topic: &PlannedTopic) -> String {
    format!("persistent/{}/{}", plan.namespace.path(), topic.name)
}

/// A value that was there, in short.
fn shown(value: &Value) -> String {
    match value {
        Value::Object(fields) => {
            let set: Vec<_> = fields.values().filter(|value| !value.is_null()).map(shown).collect();
            set.join(", ")
        }
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_done_is_said_in_words() {
        let row = |result| Row { what: String::new(), wanted: String::new(), result };
        let rows = [row(Done::Created), row(Done::Changed(Some("7".to_owned()))), row(Done::Same), row(Done::Same)];
        assert_eq!(summary(&rows), "1 created, 1 set, 2 as they were");
        assert_eq!(rows[1].result.to_string(), "set (was 7)");
        let dry = [row(Done::WouldCreate), row(Done::WouldChange(None)), row(Done::Same)];
        assert_eq!(summary(&dry), "nothing was changed: 2 would be created or set, 1 are as wanted");
        assert_eq!(shown(&json!({ "a": 1, "b": null, "c": "x" })), "1, x");
    }
}
