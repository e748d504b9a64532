//! `gradwire launch -H`: ranks on other hosts, by a real sshd on loopback. Without an sshd these tests say so and pass.
#![allow(clippy::unwrap_used, reason = "a test helper fails by panicking")]

mod support;

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::Signal;
use support::{Launcher, Outcome, await_condition, children, kill};
use tempfile::TempDir;

const SSHD: &str = "/usr/sbin/sshd";

/// A server for this user alone, with two names for it: `nodea` and `nodeb`.
struct Sshd {
    server: Child,
    directory: TempDir,
}

impl Sshd {
    /// Starts it, or says that there is none to start.
    fn start() -> Option<Self> {
        if !Path::new(SSHD).exists() {
            eprintln!("SKIPPED: {SSHD} is not installed");
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        for key in ["host_key", "user_key"] {
            let made = Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(at(key)).status();
            assert!(made.unwrap().success());
        }
        fs::copy(at("user_key.pub"), at("authorized_keys")).unwrap();
        fs::set_permissions(at("authorized_keys"), fs::Permissions::from_mode(0o600)).unwrap();
        if rustix::process::getuid().is_root() {
            // Where sshd goes with its privileges dropped; the service makes it when it starts.
            fs::create_dir_all("/run/sshd").unwrap();
        }
        let port = TcpListener::bind("127.0.0.2:0").unwrap().local_addr().unwrap().port();
        let server_config = format!(
            "Port {port}\nListenAddress 127.0.0.2\nHostKey {}\nAuthorizedKeysFile {}\nStrictModes no\nUsePAM no\n\
             PasswordAuthentication no\nPermitRootLogin yes\nPidFile none\nMaxStartups 100\n",
            at("host_key").display(),
            at("authorized_keys").display(),
        );
        fs::write(at("sshd_config"), server_config).unwrap();
        let client_config = format!(
            "Host nodea nodeb\n  HostName 127.0.0.2\n  Port {port}\nHost closed\n  HostName 127.0.0.2\n  Port 1\n\
             Host *\n  IdentityFile {}\n  IdentitiesOnly yes\n  UserKnownHostsFile {}\n  StrictHostKeyChecking no\n",
            at("user_key").display(),
            at("known_hosts").display(),
        );
        fs::write(at("ssh_config"), client_config).unwrap();
        let server = Command::new(SSHD)
            .args(["-D", "-e", "-f"])
            .arg(at("sshd_config"))
            .stdin(Stdio::null())
            .stderr(fs::File::create(at("log")).unwrap())
            .spawn()
            .unwrap();
        let sshd = Self { server, directory };
        await_condition("sshd listens", || TcpStream::connect(("127.0.0.2", port)).ok());
        Some(sshd)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn start_job(&self, arguments: &[&str], script: &str) -> Launcher {
        let ssh = format!("ssh -F {}", self.path("ssh_config").display());
        let mut all = vec!["--ssh", &ssh];
        all.extend(arguments);
        Launcher::start(&all, script)
    }

    fn launch(&self, arguments: &[&str], script: &str) -> Outcome {
        self.start_job(arguments, script).finish()
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
        if std::thread::panicking() {
            eprintln!("{}", fs::read_to_string(self.path("log")).unwrap_or_default());
        }
    }
}

#[test]
fn ranks_run_on_several_hosts_in_blocks() {
    let Some(sshd) = Sshd::start() else { return };
    let outcome = sshd.launch(
        &["-H", "nodea:2,localhost:1,nodeb:3", "-n", "5"],
        "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $GRADWIRE_ADDRESS ${#GRADWIRE_SECRET} $PWD",
    );
    assert_eq!(outcome.code(), Some(0), "{}", outcome.stderr);
    let here = std::env::current_dir().unwrap();
    let here = here.display();
    let expected = [
        format!("[0] 0 5 0 2 127.0.0.2 127.0.0.2 64 {here}"),
        format!("[1] 1 5 1 2 127.0.0.2 127.0.0.2 64 {here}"),
        format!("[2] 2 5 0 1 127.0.0.2 127.0.0.1 64 {here}"),
        format!("[3] 3 5 0 2 127.0.0.2 127.0.0.2 64 {here}"),
        format!("[4] 4 5 1 2 127.0.0.2 127.0.0.2 64 {here}"),
    ];
    assert_eq!(outcome.lines(), expected);
}

#[test]
fn a_failure_names_the_host_and_ends_the_others() {
    let Some(sshd) = Sshd::start() else { return };
    let outcome =
        sshd.launch(&["-H", "localhost:1,nodea:2"], "if [ $RANK = 2 ]; then echo boom >&2; exit 7; fi; exec sleep 60");
    assert_eq!(outcome.code(), Some(7), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("rank 2 on nodea exited with code 7"), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("    [2] boom"), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("ended by gradwire: ranks 0, 1"), "{}", outcome.stderr);
}

#[test]
fn a_host_that_cannot_be_had_is_named_with_what_ssh_says() {
    let Some(sshd) = Sshd::start() else { return };
    let marker = sshd.path("started");
    let script = format!("touch {}", marker.display());
    for (arguments, words) in [
        (vec!["-H", "localhost:1,no-such-host.invalid:1"], ["no-such-host.invalid", "resolve"]),
        (vec!["-H", "nodea:1,closed:1"], ["closed", "refused"]),
        (vec!["-H", "nodea:1", "--remote-gradwire", "/nonexistent/gradwire"], ["nodea", "--remote-gradwire PATH"]),
        (vec!["-H", "nodea:1", "--ssh-args", "-o PubkeyAuthentication=no"], ["nodea", "denied"]),
        (vec!["-H", "nodea:1", "--address", "203.0.113.1"], ["203.0.113.1", "not one of this machine"]),
    ] {
        let outcome = sshd.launch(&arguments, &script);
        assert_ne!(outcome.code(), Some(0), "{arguments:?}");
        for word in words {
            assert!(outcome.stderr.contains(word), "{arguments:?}: {}", outcome.stderr);
        }
        assert!(!marker.exists(), "{arguments:?}: a rank was started");
    }
}

/// A rank that does not go by itself, with a child that hides.
const STUBBORN: &str = "trap '' TERM HUP INT; (setsid sh -c 'trap \"\" TERM HUP INT; while :; do sleep 1; done' \
                        </dev/null >/dev/null 2>&1 &); echo up; while :; do sleep 1; done";

#[test]
fn nothing_remote_outlives_a_launcher_that_is_killed() {
    let Some(sshd) = Sshd::start() else { return };
    let launcher = sshd.start_job(&["-H", "nodea:1,nodeb:1"], STUBBORN);
    launcher.await_line("up");
    launcher.await_line("up");
    launcher.signal(Signal::KILL);
    assert_eq!(launcher.finish().code(), None);
}

#[test]
fn a_connection_or_an_agent_that_is_lost_ends_the_job_and_all_of_it() {
    let Some(sshd) = Sshd::start() else { return };
    let launcher = sshd.start_job(&["-H", "nodea:1,localhost:1"], STUBBORN);
    launcher.await_line("up");
    launcher.await_line("up");
    let ssh = launcher.agents().into_iter().find(|pid| {
        fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.windows(5).any(|part| part == b"nodea"))
    });
    kill(ssh.unwrap(), Signal::KILL);
    let outcome = launcher.finish();
    assert_eq!(outcome.code(), Some(1));
    assert!(outcome.stderr.contains("lost the agent on nodea"), "{}", outcome.stderr);

    let launcher = sshd.start_job(&["-H", "nodea:1,localhost:1"], STUBBORN);
    launcher.await_line("up");
    launcher.await_line("up");
    // The remote agent is the parent of a rank, and no child of the launcher.
    let agents: Vec<i32> = support::all_processes()
        .filter(|pid| children(*pid).iter().any(|child| launcher.processes().contains(child)))
        .filter(|pid| !launcher.agents().contains(pid) && !launcher.processes().contains(pid))
        .collect();
    assert_eq!(agents.len(), 1, "{agents:?}");
    kill(agents[0], Signal::KILL);
    let outcome = launcher.finish();
    assert_eq!(outcome.code(), Some(1));
    assert!(outcome.stderr.contains("lost the agent on nodea"), "{}", outcome.stderr);
}

#[test]
fn signals_reach_remote_ranks() {
    let Some(sshd) = Sshd::start() else { return };
    let script = "trap 'echo got usr1' USR1; trap 'exit 0' TERM; echo up; while :; do sleep 0.05; done";
    let launcher = sshd.start_job(&["-H", "nodea:1,localhost:1"], script);
    launcher.await_line("up");
    launcher.await_line("up");
    launcher.signal(Signal::USR1);
    launcher.await_line("got usr1");
    launcher.await_line("got usr1");
    launcher.signal(Signal::TERM);
    assert_eq!(launcher.finish().code(), Some(0));
}
