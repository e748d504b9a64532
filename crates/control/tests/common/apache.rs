//! An Apache Pulsar of a test's own, by `ci/pulsar/standalone`.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// Runs for as long as this lives. Ends with this process, however that ends: a command beside it waits for the end
/// of its input, which is a pipe of ours.
pub struct Standalone {
    runner: Child,
    variables: HashMap<String, String>,
}

impl Standalone {
    /// Starts one, with options of `ci/pulsar/standalone run`.
    pub fn run(options: &[&str]) -> Self {
        let mut runner = Command::new(program())
            .arg("run")
            .args(options)
            .args(["--", "sh", "-c", "env; echo; exec cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("ci/pulsar/standalone runs");
        let lines = BufReader::new(runner.stdout.take().expect("a pipe")).lines().map_while(Result::ok);
        let variables: HashMap<_, _> = lines
            .take_while(|line| !line.is_empty())
            .filter(|line| line.starts_with("PULSAR_"))
            .filter_map(|line| line.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned())))
            .collect();
        assert!(variables.contains_key("PULSAR_URL"), "Apache Pulsar does not start: see above");
        Self { runner, variables }
    }

    /// What it tells to the command beside it.
    pub fn variable(&self, name: &str) -> Option<String> {
        self.variables.get(name).cloned()
    }

    /// A token for a role, of a broker that was started with `--auth`.
    pub fn token(&self, role: &str, options: &[&str]) -> String {
        let data = self.variable("PULSAR_DATA").expect("a directory");
        let token = Command::new(program()).args(["token", &data, role]).args(options).output().expect("it runs");
        assert!(token.status.success(), "{}", String::from_utf8_lossy(&token.stderr));
        String::from_utf8(token.stdout).expect("text").trim().to_owned()
    }

    pub fn kill(&self) {
        self.ask("kill");
    }

    pub fn start(&self) {
        self.ask("start");
    }

    fn ask(&self, what: &str) {
        let data = self.variable("PULSAR_DATA").expect("a directory");
        let status = Command::new(program()).args([what, &data]).status().expect("it runs");
        assert!(status.success(), "Apache Pulsar cannot be asked to {what}: see above");
    }
}

impl Drop for Standalone {
    fn drop(&mut self) {
        drop(self.runner.stdin.take());
        let _ = self.runner.wait();
    }
}

fn program() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../ci/pulsar/standalone")
}
