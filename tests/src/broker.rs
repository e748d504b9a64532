//! `gradwire broker` as a process, which can be killed and started again at the same URL and with the same data.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use crate::binary;

/// A broker that keeps its topics in a directory. Dropping it kills it, and removes the directory.
#[derive(Debug)]
pub struct DurableBroker {
    data: TempDir,
    url: String,
    process: Child,
}

impl DurableBroker {
    /// Starts one at any port that is free. It admits everybody.
    ///
    /// # Panics
    /// When it does not start.
    #[must_use]
    pub fn start() -> Self {
        let data = tempfile::tempdir().expect("a directory");
        let (process, url) = start("127.0.0.1:0", &data);
        Self { data, url, process }
    }

    /// Where it is.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Kills it with SIGKILL.
    ///
    /// # Panics
    /// When it does not run.
    pub fn kill(&mut self) {
        self.process.kill().expect("it runs");
        self.process.wait().expect("it ends");
    }

    /// Starts it again.
    ///
    /// # Panics
    /// When it does not start.
    pub fn again(&mut self) {
        self.process = start(self.url.trim_start_matches("pulsar://"), &self.data).0;
    }
}

impl Drop for DurableBroker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn start(listen: &str, data: &TempDir) -> (Child, String) {
    let mut process = Command::new(binary("gradwire"))
        .args(["broker", "--no-auth", "--listen", listen, "--data-dir"])
        .arg(data.path())
        .stdout(Stdio::piped())
        .spawn()
        .expect("gradwire starts");
    let mut url = String::new();
    BufReader::new(process.stdout.take().expect("a pipe")).read_line(&mut url).expect("its URL");
    assert!(url.starts_with("pulsar://"), "the broker does not start: see above");
    (process, url.trim().to_owned())
}
