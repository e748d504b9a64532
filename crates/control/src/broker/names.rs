//! Topic names, as Pulsar writes them.

use pulsar::message::proto::ServerError;

use super::store::Refused;

/// Longest topic, subscription or producer name. A topic's counts as it is after it was completed.
pub(super) const NAME_BYTES_MAX: usize = 512;

/// What the names of topics start with that keep nothing for who is not there.
pub(super) const NON_PERSISTENT: &str = "non-persistent://";

/// The full name of a topic: `persistent://tenant/namespace/name`, as Pulsar completes short names.
///
/// # Errors
/// When it is no topic name, or names a partition: there are none here.
pub(super) fn full_name(name: &str) -> Result<String, Refused> {
    let refused = || Refused(ServerError::InvalidTopicName, format!("'{}' is not a topic name", name.escape_debug()));
    if name.is_empty() || name.chars().any(char::is_control) {
        return Err(Refused(ServerError::InvalidTopicName, "a topic name is empty or unprintable".to_owned()));
    }
    check_length(name)?;
    if let Some((base, number)) = name.rsplit_once("-partition-")
        && !number.is_empty()
        && number.bytes().all(|byte| byte.is_ascii_digit())
    {
        let detail = format!(
            "{name} is a partition, and the embedded broker has no partitioned topics: use '{base}' or another name \
             without '-partition-{number}', or an Apache Pulsar cluster"
        );
        return Err(Refused(ServerError::NotAllowedError, detail));
    }
    let (domain, rest) = name.split_once("://").unwrap_or(("persistent", name));
    if domain != "persistent" && domain != "non-persistent" {
        return Err(refused());
    }
    let parts: Vec<&str> = rest.splitn(3, '/').collect();
    let full = match parts[..] {
        [topic] => format!("{domain}://public/default/{topic}"),
        [tenant, namespace, topic] if !tenant.is_empty() && !namespace.is_empty() && !topic.is_empty() => {
            format!("{domain}://{rest}")
        }
        _ => return Err(refused()),
    };
    check_length(&full)?;
    Ok(full)
}

/// Checks a completed name.
///
/// # Errors
/// When it is longer than what can be kept.
pub(super) fn check_length(name: &str) -> Result<(), Refused> {
    if name.len() <= NAME_BYTES_MAX {
        return Ok(());
    }
    let detail =
        format!("a topic name of {} bytes; with tenant and namespace, the limit is {NAME_BYTES_MAX}", name.len());
    Err(Refused(ServerError::InvalidTopicName, detail))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_names_are_completed_and_bad_ones_refused() {
        assert_eq!(full_name("t").unwrap(), "persistent://public/default/t");
        assert_eq!(full_name("non-persistent://a/b/c/d").unwrap(), "non-persistent://a/b/c/d");
        for bad in ["", "a/b", "http://a/b/c", "persistent://a//c", "a\nb", &"x".repeat(513)] {
            full_name(bad).unwrap_err();
        }
    }

    #[test]
    fn the_limit_is_for_the_completed_name() {
        for start in ["persistent://public/default/", "non-persistent://public/default/", "persistent://a/b/"] {
            let longest = "x".repeat(NAME_BYTES_MAX - start.len());
            let given = if start.starts_with("persistent://public") { longest } else { format!("{start}{longest}") };
            assert_eq!(full_name(&given).unwrap().len(), NAME_BYTES_MAX);
            let Refused(error, detail) = full_name(&format!("{given}x")).unwrap_err();
            assert_eq!(error, ServerError::InvalidTopicName);
            assert!(detail.contains("513 bytes"), "{detail}");
        }
    }

    #[test]
    fn partitions_are_refused_with_what_to_do() {
        let Refused(error, detail) = full_name("persistent://a/b/log-partition-3").unwrap_err();
        assert_eq!(error, ServerError::NotAllowedError);
        assert!(detail.contains("use 'persistent://a/b/log'"), "{detail}");
        full_name("log-partition-x").unwrap();
    }
}
