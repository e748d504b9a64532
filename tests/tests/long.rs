//! A job that loses ranks and takes them in again, over and over: what it takes of memory, descriptors, threads and the
//! broker does not grow with its steps, and the control log grows by the same for each change.
//!
//! `GRADWIRE_TEST_STEPS=10000` makes it as long as that, with a change every 100 steps.

use gradwire_control::BrokerConfig;
use gradwire_tests::steps::assert_same;
use gradwire_tests::{Job, Plan, assert_same_verdict, status_of};
use rustix::process::Signal;

const RANKS: u32 = 4;
/// Steps where the environment says nothing.
const STEPS: usize = 600;
/// Steps between a loss and the next: in their middle the rank has come back.
const STEPS_PER_LOSS: usize = 100;

/// What may be added while twice as much, or many times as much, is done.
const RESIDENT_KIB_MORE: usize = 24 * 1024;
const DESCRIPTORS_MORE: usize = 16;
/// Those that serve a rank which has just joined may still be there.
const THREADS_MORE: usize = 2;
/// What the control log may hold for each change of members.
const CONTROL_BYTES_PER_CHANGE: usize = 4 * 1024;
/// What a topic of the broker may hold: enough for that, and so little that versions and audit fill it.
const TOPIC_BYTES: usize = 1 << 20;

/// What a process uses.
#[derive(Clone, Copy, Debug)]
struct Usage {
    resident_kib: usize,
    threads: usize,
    descriptors: usize,
}

impl Usage {
    fn of(pid: u32) -> Self {
        let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs").count();
        Self { resident_kib: status_of(pid, "VmRSS"), threads: status_of(pid, "Threads"), descriptors }
    }
}

/// What the broker holds: of the control log, and of all topics.
fn held(plan: &Plan) -> (usize, usize) {
    let stats = plan.broker().stats();
    let control = stats.topics.iter().find(|topic| topic.name.ends_with("-control")).expect("a control log");
    (control.bytes, stats.bytes)
}

#[test]
fn a_long_job_with_many_losses_takes_no_more_of_anything_in_the_end() {
    let steps = std::env::var("GRADWIRE_TEST_STEPS").map_or(STEPS, |text| text.parse().expect("a number of steps"));
    let mut config = BrokerConfig::new(([127, 0, 0, 1], 0).into());
    config.topic_bytes_max = TOPIC_BYTES;
    let plan = Plan::with_broker(RANKS, "auto", config)
        .with("GRADWIRE_RECOVERY", "redo")
        .with("GRADWIRE_DEADLINE_MS", 60_000)
        .with("GRADWIRE_COMMIT_INTERVAL_MS", 0);
    let command = |rank| plan.command_of("e2e-elastic", rank, &[&steps.to_string(), "5"]);
    let mut job = Job::start((0..RANKS).map(command));
    // These two stay, and are looked at; the others are lost in turns.
    let mut processes = [0, 1, 2, 3];
    let mut seen = Vec::new();
    // The last that comes back has to find the others.
    let losses = steps / STEPS_PER_LOSS - 1;
    for loss in 0..losses {
        let begin = loss * STEPS_PER_LOSS;
        job.wait_for_line(0, &format!("step {} ", begin + 20));
        let victim = 2 + loss % 2;
        job.signal(processes[victim], Signal::KILL);
        job.wait_for_line(0, &format!("step {} ", begin + STEPS_PER_LOSS / 2));
        processes[victim] = job.add(command(victim as u32));
        job.wait_for_line(processes[victim], "joined ");
        let usage = [0, 1].map(|rank| Usage::of(job.pid(rank)));
        println!("after {} changes: {usage:?}, the broker holds {:?}", 2 * (loss + 1), held(&plan));
        seen.push((usage, held(&plan)));
    }
    let ended = job.wait();
    let all = assert_same(&ended, &processes, steps);
    assert!(all.values().any(|(by, _)| by != "0,1,2,3") && all[&(steps - 1)].0 == "0,1,2,3");
    // The first changes still fill pools and buffers.
    let (early, late) = (seen[seen.len() / 4], seen[seen.len() - 1]);
    for (early, late) in early.0.iter().zip(&late.0) {
        assert!(late.resident_kib <= early.resident_kib + RESIDENT_KIB_MORE, "{seen:#?}");
        assert!(late.descriptors <= early.descriptors + DESCRIPTORS_MORE, "{seen:#?}");
        assert!(late.threads <= early.threads + THREADS_MORE, "{seen:#?}");
    }
    let (control, all) = late.1;
    assert!(control <= 2 * losses * CONTROL_BYTES_PER_CHANGE, "the control log holds {control} bytes");
    assert!(all <= control + 3 * TOPIC_BYTES, "the broker holds {all} bytes");
}

/// Found by looking for what grows: every commit is audited, and when the audit log was full no commit was put on record any more.
#[test]
fn a_job_goes_on_when_its_audit_log_is_full() {
    const AUDIT_BYTES: usize = 32 * 1024;
    let mut config = BrokerConfig::new(([127, 0, 0, 1], 0).into());
    config.topic_bytes_max = AUDIT_BYTES;
    let plan = Plan::with_broker(2, "auto", config).with("GRADWIRE_COMMIT_INTERVAL_MS", 0);
    let folder = tempfile::tempdir().expect("a directory");
    let stop = folder.path().join("stop");
    let mut job = plan.start(&["commits", &stop.display().to_string()]);
    // Many more commits than are audited in so many bytes: close() says what is not on record.
    job.wait_for_line(0, "step 300");
    std::fs::write(&stop, "").expect("a file");
    let said = assert_same_verdict(&job.wait());
    assert!(said.starts_with("ok "), "{said}");
    let stats = plan.broker().stats();
    let audit = stats.topics.iter().find(|topic| topic.name.ends_with("-audit")).expect("an audit log");
    assert!(audit.published > 2 * 300 && audit.bytes <= AUDIT_BYTES, "{audit:?}");
}
