//! Questions about topics that need neither producer nor consumer.

use std::time::{Duration, Instant};

use pulsar::message::proto::{
    BaseCommand, CommandGetOrCreateSchema, CommandGetSchema, CommandGetTopicsOfNamespace, ServerError,
    command_get_topics_of_namespace::Mode,
};
use regex::{Regex, RegexBuilder};

use super::super::names::full_name;
use super::super::replies;
use super::super::store::Refused;
use super::Session;

/// Longest pattern. Names are shorter.
const PATTERN_BYTES_MAX: usize = 1 << 10;
/// Largest automaton that a pattern may need, in bytes. Making it takes time, in which other links wait.
const AUTOMATON_BYTES_MAX: usize = 128 << 10;
/// How long names may be compared with a pattern, for the same reason.
const MATCHING_MAX: Duration = Duration::from_millis(20);

/// The last pattern of a link. Clients ask for the same one again and again.
#[derive(Debug, Default)]
pub(super) struct LastPattern {
    text: String,
    /// Nothing for one that is left to the client.
    compiled: Option<Regex>,
}

impl LastPattern {
    fn compiled(&mut self, text: &str) -> Option<&Regex> {
        if text.len() > PATTERN_BYTES_MAX {
            return None;
        }
        if self.text != text {
            self.compiled = whole_name_pattern(text);
            text.clone_into(&mut self.text);
        }
        self.compiled.as_ref()
    }
}

impl Session {
    /// The topics of a namespace, of those that a pattern fits on if there is one. A pattern that this broker cannot
    /// read, or that takes it too long, is left to the client, which filters too.
    pub(super) fn topics_of(&mut self, request: &CommandGetTopicsOfNamespace) -> BaseCommand {
        let last = &mut self.last_pattern;
        let mut pattern = request.topics_pattern.as_deref().and_then(|text| last.compiled(text));
        let mode = request.mode.unwrap_or_default();
        let started = Instant::now();
        let store = self.broker.store();
        let mut topics = Vec::new();
        for (domain, other) in [("persistent", Mode::NonPersistent), ("non-persistent", Mode::Persistent)] {
            if mode != other as i32 {
                let prefix = format!("{domain}://{}/", request.namespace);
                for name in store.names(&prefix) {
                    pattern = pattern.filter(|_| started.elapsed() < MATCHING_MAX);
                    if pattern.is_none_or(|pattern| pattern.is_match(without_domain(name))) {
                        topics.push(name.clone());
                    }
                }
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
    let mut builder = RegexBuilder::new(&format!("^(?:{})$", without_domain(pattern)));
    builder.size_limit(AUTOMATON_BYTES_MAX).dfa_size_limit(2 * AUTOMATON_BYTES_MAX).build().ok()
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
        for large in ["(a{1000}){1000}", r"(?:\pL{20}){60}"] {
            assert!(whole_name_pattern(large).is_none(), "{large}");
        }
        for common in [r"a/b/[\w.-]+", r"[\p{L}_-]+/b/log-\d{1,6}", ".*/.*/.*-(control|versions|results)"] {
            assert!(whole_name_pattern(common).is_some(), "{common}");
        }
    }

    #[test]
    fn the_last_pattern_is_compiled_once() {
        let mut last = LastPattern::default();
        assert!(last.compiled("").is_none() && last.compiled("(").is_none());
        let first = std::ptr::from_ref(last.compiled("a/b/.*").unwrap());
        last.text.push('!');
        assert!(last.compiled("a/b/.*!").is_some_and(|again| std::ptr::eq(first, again) && again.is_match("a/b/c")));
        let long = "a".repeat(PATTERN_BYTES_MAX);
        assert!(last.compiled(&long).is_some() && last.compiled(&format!("{long}a")).is_none());
        assert!(last.compiled("a/b/d").is_some_and(|other| !other.is_match("a/b/c")));
    }
}
