//! The admin interface of a Pulsar cluster, over HTTP. Every call ends within a bounded time, and its errors say what
//! an operator can do about them.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde_json::Value;
use ureq::http::{Method, Request, Response, StatusCode, header};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

use super::token::expiry_in_words;

/// How long a call may take: creating a namespace on a busy cluster takes seconds.
const CALL_TIME_MAX: Duration = Duration::from_secs(60);
const CONNECT_TIME_MAX: Duration = Duration::from_secs(10);
/// Longest answer: lists of topics.
const ANSWER_BYTES_MAX: u64 = 32 << 20;
/// Brokers send callers on to the one that owns a topic.
const REDIRECTS_MAX: u32 = 5;
/// Longest reason of the cluster that is shown.
const REASON_CHARS_MAX: usize = 300;

/// Why a call did not do what it should.
#[derive(Debug, thiserror::Error)]
pub(super) enum AdminError {
    #[error("{url} cannot be reached: {reason}; is the cluster up, and is this the URL of its web service?")]
    Unreachable { url: String, reason: String },
    #[error(
        "{url} does not speak HTTP ({reason}): is that the brokers' port? The admin interface is at the web service's, \
         8080 or 8443 if nothing else is configured"
    )]
    NotHttp { url: String, reason: String },
    #[error("{url} speaks HTTP, but it is not the admin interface of a Pulsar cluster: {told}")]
    NotPulsar { url: String, told: String },
    #[error("{url} asks for a token: give one by --token-file")]
    NoToken { url: String },
    #[error("{url} does not accept the token{expiry}: {reason}; is it signed with a key of this cluster?")]
    WrongToken { url: String, expiry: String, reason: String },
    #[error(
        "the token's role has no right to {what}: {reason}; tenants take a super user's token, all else that of an \
         administrator of the tenant"
    )]
    Forbidden { what: String, reason: String },
    #[error("the cluster refused to {what}: {status} {reason}")]
    Refused { what: String, status: StatusCode, reason: String },
}

/// What a call is answered.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: StatusCode,
    text: String,
}

impl Answer {
    /// The answer as JSON; null when there is none.
    pub(super) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or(Value::Null)
    }

    /// Why not, in the cluster's words.
    fn reason(&self) -> String {
        let json = self.json();
        // What is refused before it gets to the cluster itself comes as a page.
        let title = || self.text.split_once("<title>")?.1.split_once("</title>").map(|(title, _)| title);
        let told = json.get("reason").and_then(Value::as_str).or_else(title).unwrap_or(&self.text);
        let short: String = told.trim().replace('\n', " ").chars().take(REASON_CHARS_MAX).collect();
        if short.is_empty() { "no reason given".to_owned() } else { short }
    }
}

/// A client of the admin interface.
#[derive(Debug)]
pub(super) struct Admin {
    agent: Agent,
    /// Without a slash at its end.
    url: String,
    token: Option<String>,
}

impl Admin {
    /// A client for `url`, which [`parse_url`] has seen.
    pub(super) fn new(url: &str, token: Option<String>, ca: Option<&Path>) -> Result<Self, String> {
        let mut config = Agent::config_builder()
            .timeout_global(Some(CALL_TIME_MAX))
            .timeout_connect(Some(CONNECT_TIME_MAX))
            .http_status_as_error(false)
            // They are followed here: with the token, and with the body.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("gradwire/", env!("CARGO_PKG_VERSION")));
        if is_of_this_machine(url) {
            config = config.proxy(None);
        }
        if let Some(path) = ca {
            config = config.tls_config(TlsConfig::builder().root_certs(authorities(path)?).build());
        }
        Ok(Self { agent: config.build().into(), url: url.to_owned(), token })
    }

    /// Sees whether this is Pulsar, and gives the names of its clusters.
    pub(super) fn clusters(&self) -> Result<Vec<String>, AdminError> {
        let answer = self.call(Method::GET, "clusters", None, "list the clusters")?;
        let names =
            answer.json().as_array().map(|names| names.iter().filter_map(Value::as_str).map(str::to_owned).collect());
        match names {
            Some(names) if answer.status.is_success() => Ok(names),
            _ => Err(AdminError::NotPulsar {
                url: self.url.clone(),
                told: format!("it answers {} where a list of clusters should be", answer.status),
            }),
        }
    }

    /// Asks for something; nothing when it is not there.
    pub(super) fn get(&self, path: &str, what: &str) -> Result<Option<Value>, AdminError> {
        let answer = self.call(Method::GET, path, None, what)?;
        match answer.status {
            StatusCode::NOT_FOUND => Ok(None),
            status if status.is_success() => Ok(Some(answer.json())),
            status => Err(AdminError::Refused { what: what.to_owned(), status, reason: answer.reason() }),
        }
    }

    /// Makes or changes something.
    pub(super) fn change(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        what: &str,
    ) -> Result<(), AdminError> {
        let answer = self.call(method, path, body, what)?;
        if answer.status.is_success() {
            return Ok(());
        }
        Err(AdminError::Refused { what: what.to_owned(), status: answer.status, reason: answer.reason() })
    }

    /// One call, wherever the cluster sends it. Refusals for want of rights are errors; other answers are the caller's.
    fn call(&self, method: Method, path: &str, body: Option<&Value>, what: &str) -> Result<Answer, AdminError> {
        let mut url = format!("{}/admin/v2/{path}", self.url);
        for _ in 0..=REDIRECTS_MAX {
            let response = self.send(&method, &url, body)?;
            if let Some(next) = redirect(&response) {
                // Never from https to http: the token goes along.
                if self.url.starts_with("https://") && !next.starts_with("https://") {
                    let told = format!("it sends callers from https to {next}");
                    return Err(AdminError::NotPulsar { url: self.url.clone(), told });
                }
                url = next;
                continue;
            }
            return self.judge(response, &url, what);
        }
        let told = format!("it sends callers on more than {REDIRECTS_MAX} times");
        Err(AdminError::NotPulsar { url: self.url.clone(), told })
    }

    fn send(&self, method: &Method, url: &str, body: Option<&Value>) -> Result<Response<Body>, AdminError> {
        let mut request = Request::builder().method(method.clone()).uri(url).header(header::ACCEPT, "application/json");
        if let Some(token) = &self.token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        let sent = match body {
            Some(body) => request
                .header(header::CONTENT_TYPE, "application/json")
                .body(body.to_string())
                .map_err(ureq::Error::from)
                .and_then(|request| self.agent.run(request)),
            // Of the methods in use, all but GET and DELETE have a body, which may be empty.
            None if *method == Method::GET => {
                request.body(()).map_err(ureq::Error::from).and_then(|request| self.agent.run(request))
            }
            None => request.body(String::new()).map_err(ureq::Error::from).and_then(|request| self.agent.run(request)),
        };
        sent.map_err(|error| self.unanswered(&error))
    }

    fn unanswered(&self, error: &ureq::Error) -> AdminError {
        let (url, reason) = (self.url.clone(), error.to_string());
        let closed = |error: &std::io::Error| {
            use std::io::ErrorKind::{ConnectionAborted, ConnectionReset, InvalidData, UnexpectedEof};
            matches!(error.kind(), ConnectionAborted | ConnectionReset | InvalidData | UnexpectedEof)
        };
        match error {
            ureq::Error::Protocol(_) => AdminError::NotHttp { url, reason },
            ureq::Error::Io(error) if closed(error) => AdminError::NotHttp { url, reason },
            _ => AdminError::Unreachable { url, reason },
        }
    }

    fn judge(&self, mut response: Response<Body>, url: &str, what: &str) -> Result<Answer, AdminError> {
        let status = response.status();
        let read = response.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_string();
        let answer = Answer { status, text: read.map_err(|error| self.unanswered(&error))? };
        // The cluster says 401 for some rights that are missing; it does so in JSON, and knows the role.
        let knows_role = answer.json().get("reason").is_some();
        match (status, &self.token) {
            (StatusCode::FORBIDDEN | StatusCode::UNAUTHORIZED, _) if knows_role || status == StatusCode::FORBIDDEN => {
                Err(AdminError::Forbidden { what: what.to_owned(), reason: answer.reason() })
            }
            (StatusCode::UNAUTHORIZED, None) => Err(AdminError::NoToken { url: self.url.clone() }),
            (StatusCode::UNAUTHORIZED, Some(token)) => Err(AdminError::WrongToken {
                url: self.url.clone(),
                expiry: expiry_in_words(token).map_or(String::new(), |expiry| format!(" ({expiry})")),
                reason: answer.reason(),
            }),
            _ => {
                tracing::debug!(url, %status, "the admin interface answered");
                Ok(answer)
            }
        }
    }
}

fn redirect(response: &Response<Body>) -> Option<String> {
    let location = || response.headers().get(header::LOCATION)?.to_str().ok().map(str::to_owned);
    response.status().is_redirection().then(location).flatten()
}

fn authorities(path: &Path) -> Result<RootCerts, String> {
    let shown = path.display();
    let pem = std::fs::read(path).map_err(|error| format!("cannot read the authorities from {shown}: {error}"))?;
    let mut found: Vec<Certificate<'static>> = Vec::new();
    for item in parse_pem(&pem) {
        match item {
            Ok(PemItem::Certificate(certificate)) => found.push(certificate),
            Ok(_) => {}
            Err(error) => return Err(format!("{shown} is not a PEM file: {error}")),
        }
    }
    if found.is_empty() {
        return Err(format!("there is no certificate in {shown}"));
    }
    Ok(RootCerts::Specific(Arc::new(found)))
}

/// How the clock of a cluster differs from ours.
#[derive(Debug)]
pub(crate) struct Clock {
    pub(crate) difference: Duration,
    /// Whether theirs is ahead.
    pub(crate) ahead: bool,
    /// How far the difference may be wrong: HTTP tells whole seconds, and the answer was on its way.
    pub(crate) error: Duration,
}

/// Compares clocks by the Date of an answer, whatever the answer is.
pub(crate) fn clock_difference(url: &str, token: Option<String>, ca: Option<&Path>) -> Result<Clock, String> {
    let admin = Admin::new(url, token, ca)?;
    let before = SystemTime::now();
    let response = admin.send(&Method::GET, &format!("{url}/admin/v2/clusters"), None).map_err(|e| e.to_string())?;
    let took = before.elapsed().unwrap_or_default();
    let told = response.headers().get(header::DATE).and_then(|date| date.to_str().ok()).unwrap_or_default();
    let theirs =
        httpdate::parse_http_date(told).map_err(|_| format!("{url} answers {} without a date", response.status()))?;
    // On average the seconds that it tells are half a second old.
    let (theirs, ours) = (theirs + Duration::from_millis(500), before + took / 2);
    let error = took / 2 + Duration::from_millis(500);
    Ok(match theirs.duration_since(ours) {
        Ok(difference) => Clock { difference, ahead: true, error },
        Err(behind) => Clock { difference: behind.duration(), ahead: false, error },
    })
}

/// Checks a URL of `--admin`, and takes away what need not be there.
pub(crate) fn parse_url(text: &str) -> Result<String, String> {
    if text.starts_with("pulsar://") || text.starts_with("pulsar+ssl://") {
        return Err("that is the URL of the brokers; the admin interface is http:// or https://, and at another port \
                    (8080 or 8443 if nothing else is configured)"
            .to_owned());
    }
    let rest = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://"));
    let Some(host) = rest.map(|rest| rest.split(['/', '?', '#']).next().unwrap_or_default()) else {
        return Err("expected a URL such as http://pulsar.example:8080".to_owned());
    };
    if host.is_empty() || host.starts_with(':') || host.contains(['@', ' ']) {
        return Err("expected a URL such as http://pulsar.example:8080, with a host".to_owned());
    }
    let url = text.trim_end_matches('/');
    Ok(url
        .strip_suffix("/admin/v2")
        .or_else(|| url.strip_suffix("/admin"))
        .unwrap_or(url)
        .trim_end_matches('/')
        .to_owned())
}

/// Whether no proxy can be between.
fn is_of_this_machine(url: &str) -> bool {
    let host = url.split_once("://").map_or(url, |(_, rest)| rest).split('/').next().unwrap_or_default();
    ["127.", "localhost", "[::1]"].iter().any(|own| host.starts_with(own))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_of_the_admin_interface() {
        for (given, url) in [
            ("http://h:8080", "http://h:8080"),
            ("https://h:8443/", "https://h:8443"),
            ("http://h:8080/admin/v2/", "http://h:8080"),
            ("http://h/pulsar/admin", "http://h/pulsar"),
            ("http://[::1]:8080", "http://[::1]:8080"),
        ] {
            assert_eq!(parse_url(given).as_deref(), Ok(url));
        }
        for bad in ["", "h:8080", "ftp://h", "http://", "http://:8080", "http:///x", "http://user:word@h:1"] {
            assert!(parse_url(bad).is_err(), "{bad}");
        }
        assert!(parse_url("pulsar://h:6650").unwrap_err().contains("8080"));
    }

    #[test]
    fn reasons_are_those_of_the_cluster_and_bounded() {
        let answer = |text: &str| Answer { status: StatusCode::CONFLICT, text: text.to_owned() };
        assert_eq!(answer(r#"{"reason":"it is there"}"#).reason(), "it is there");
        assert_eq!(answer("plain\ntext").reason(), "plain text");
        assert_eq!(answer("<html><title>Error 401</title><body>long</body>").reason(), "Error 401");
        assert_eq!(answer("").reason(), "no reason given");
        assert_eq!(answer(&"x".repeat(5000)).reason().len(), REASON_CHARS_MAX);
        assert_eq!(answer("").json(), Value::Null);
    }
}
