//! Questions about topics that need neither producer nor consumer.

use pulsar::message::proto::{
    BaseCommand, CommandGetOrCreateSchema, CommandGetSchema, CommandGetTopicsOfNamespace, ServerError,
    command_get_topics_of_namespace::Mode,
};
use regex::{Regex, RegexBuilder};

use super::super::names::full_name;
use super::super::replies;
use super::super::store::Refused;
use super::Session;

/// Largest automaton that a client's pattern may need, in bytes.
const PATTERN_BYTES_MAX: usize = 1 << 20;

impl Session {
    /// The topics of a namespace, of those that a pattern fits on if there is one. A pattern that this broker cannot
    /// read is left to the client, which filters too.
    pub(super) fn topics_of(&self, request: &CommandGetTopicsOfNamespace) -> BaseCommand {
        let pattern = request.topics_pattern.as_deref().and_then(whole_name_pattern);
        let mode = request.mode.unwrap_or_default();
        let store = self.broker.store();
        let mut topics = Vec::new();
        for (domain, other) in [("persistent", Mode::NonPersistent), ("non-persistent", Mode::Persistent)] {
            if mode != other as i32 {
                let prefix = format!("{domain}://{}/", request.namespace);
                let fits =
                    |name: &&String| pattern.as_ref().is_none_or(|pattern| pattern.is_match(without_domain(name)));
                topics.extend(store.names(&prefix).filter(fits).cloned());
            }
        }
        replies::topics(request.request_id, topics, pattern.is_some())
    }

    pub(super) fn get_schema(&self, request: &CommandGetSchema) -> BaseCommand {
        let found = full_name(&request.topic).and_then(|topic| {
            let found = self.broker.store().schema(&topic, request.schema_version.as_deref());
            found.ok_or_else(|| Refused(ServerError::TopicNotFound, format!("topic {topic} has no such schema")))
        });
        replies::schema(request.request_id, found)
    }

    pub(super) fn get_or_create_schema(&self, request: CommandGetOrCreateSchema) -> BaseCommand {
        let topic = full_name(&request.topic);
        let version = topic.and_then(|topic| self.broker.store().add_schema(&topic, request.schema));
        replies::schema_version(request.request_id, version)
    }
}

/// Clients write patterns with or without domain, and mean the whole name.
fn whole_name_pattern(pattern: &str) -> Option<Regex> {
    RegexBuilder::new(&format!("^(?:{})$", without_domain(pattern))).size_limit(PATTERN_BYTES_MAX).build().ok()
}

fn without_domain(name: &str) -> &str {
    name.split_once("://").map_or(name, |(_, rest)| rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_for_whole_names_of_any_domain() {
        for pattern in ["persistent://a/b/log-.*", "a/b/log-.*"] {
            let pattern = whole_name_pattern(pattern).unwrap();
            assert!(pattern.is_match(without_domain("non-persistent://a/b/log-1")));
            assert!(!pattern.is_match(without_domain("persistent://xa/b/log-1")));
        }
        assert!(whole_name_pattern("a(").is_none());
        assert!(whole_name_pattern("(a{1000}){1000}").is_none());
    }
}
