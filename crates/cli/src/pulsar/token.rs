//! What tokens say about themselves.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

/// When a token expired or will expire, if it is a JSON web token that says so.
///
/// Nothing is verified: only the broker can. It tells people why a token that was good is good no more.
pub(crate) fn expiry_in_words(token: &str) -> Option<String> {
    let claims = token.split('.').nth(1)?;
    let claims: serde_json::Value =
        serde_json::from_slice(&URL_SAFE_NO_PAD.decode(claims.trim_end_matches('=')).ok()?).ok()?;
    let expires = UNIX_EPOCH.checked_add(Duration::from_secs(claims.get("exp")?.as_u64()?))?;
    match SystemTime::now().duration_since(expires) {
        Ok(since) => Some(format!("it expired {} ago", in_words(since))),
        Err(error) => Some(format!("it expires in {}", in_words(error.duration()))),
    }
}

fn in_words(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..120 => format!("{seconds} s"),
        seconds @ 120..7200 => format!("{} minutes", seconds / 60),
        seconds @ 7200..172_800 => format!("{} hours", seconds / 3600),
        seconds => format!("{} days", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_say_when_they_expire() {
        let token = |claims: &str| format!("e30.{}.signature", URL_SAFE_NO_PAD.encode(claims));
        assert!(expiry_in_words(&token(r#"{"exp":1}"#)).unwrap().starts_with("it expired "));
        assert!(expiry_in_words(&token(r#"{"exp":99999999999}"#)).unwrap().starts_with("it expires in "));
        for silent in [token("{}"), token("nonsense"), token(r#"{"exp":-1}"#), String::new(), "a.b.c".to_owned()] {
            assert_eq!(expiry_in_words(&silent), None, "{silent}");
        }
        assert!(expiry_in_words(&token(r#"{"exp":18446744073709551615}"#)).is_none_or(|text| text.contains("days")));
    }
}
