//! The federated mode over a real broker: exactly-once sums, whatever comes twice, late, or not at all.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod common;
#[path = "common/federated.rs"]
mod support;

use std::time::Duration;

use common::*;
use gradwire_control::federated::{Aggregator, Contributed, Contributor, ContributorConfig, Entry, LatePolicy};
use gradwire_control::{AuditKind, AuditQuery, JobConfig, Topic, VersionQuery, read_audit, read_versions};
use gradwire_proto::{FaultKind, Rank, Round, Secret, WireFormat};
use support::*;

fn origins(entries: &[Entry]) -> Vec<(u32, u64)> {
    entries.iter().map(|entry| (entry.contributor.0, entry.origin.0)).collect()
}

#[test]
fn all_contribute_and_every_aggregator_makes_the_same_bits() {
    let broker = test_broker();
    for (wire, aggregators) in [(WireFormat::Fp32, 1), (WireFormat::Fp16, 2), (WireFormat::Bf16, 3)] {
        let settings = Settings { wire, ..Settings::new(job(broker.url(), &unique("all"), 1), 3) };
        let running: Vec<Aggregator> = (0..aggregators).map(|_| settings.aggregator()).collect();
        let mut contributors = settings.join_all();
        for round in 1..=4 {
            settings.exchange(&mut contributors, round);
        }
        let counters = running.iter().map(Aggregator::counters);
        assert_eq!(counters.map(|counters| counters.results).sum::<u64>(), 4 * u64::from(settings.shards()));
        for aggregator in running {
            aggregator.stop().unwrap();
        }
        settings.assert_recorded(4);
    }
}

#[test]
fn aggregators_come_and_go_in_mid_round() {
    let broker = test_broker();
    let settings = Settings::new(job(broker.url(), &unique("come"), 1), 4);
    let first = settings.aggregator();
    let mut contributors = settings.join_all();
    settings.exchange(&mut contributors, 1);
    // Half of round 2 is with the first one when the second comes.
    contribute(&settings, &mut contributors[..2], 2);
    eventually("the first one holds it", || (first.counters().updates > settings.pieces(4)).then_some(()));
    let second = settings.aggregator();
    contribute(&settings, &mut contributors[2..], 2);
    settings.assert_results(&mut contributors, 2);
    settings.exchange(&mut contributors, 3);
    eventually("both work", || (first.counters().results > 0 && second.counters().results > 0).then_some(()));
    // Half of round 4 is with both when the first one goes.
    contribute(&settings, &mut contributors[..2], 4);
    first.stop().unwrap();
    contribute(&settings, &mut contributors[2..], 4);
    settings.assert_results(&mut contributors, 4);
    // And nobody is there when round 5 begins.
    second.stop().unwrap();
    contribute(&settings, &mut contributors, 5);
    let third = settings.aggregator();
    settings.assert_results(&mut contributors, 5);
    third.stop().unwrap();
    settings.assert_recorded(5);
}

#[test]
fn a_consumer_that_takes_and_does_nothing_delays_until_it_is_gone() {
    let broker = test_broker();
    let settings = Settings::new(job(broker.url(), &unique("hoard"), 1), 2);
    let mut contributors = settings.join_all();
    let hoarder = Hoarder::start(&settings.job);
    let aggregator = settings.aggregator();
    contribute(&settings, &mut contributors, 1);
    eventually("it has something", || (hoarder.taken() > 0).then_some(()));
    drop(hoarder);
    settings.assert_results(&mut contributors, 1);
    aggregator.stop().unwrap();
}

#[test]
fn with_a_quorum_late_contributions_are_rejected_or_carried() {
    let broker = test_broker();
    for late in [LatePolicy::Reject, LatePolicy::Carry] {
        let settings = Settings {
            quorum: 2,
            late,
            round_deadline: Duration::from_millis(300),
            ..Settings::new(job(broker.url(), &unique("late"), 1), 3)
        };
        let aggregators = [settings.aggregator(), settings.aggregator()];
        let mut contributors = settings.join_all();
        contribute(&settings, &mut contributors[..2], 1);
        for contributor in &mut contributors {
            let result = contributor.result(1, PATIENCE).unwrap();
            assert_eq!(origins(&result.entries), [(0, 1), (1, 1)]);
            settings.assert_bits(&result);
        }
        assert!(contributors[2].result(1, PATIENCE).unwrap().late);
        let outcome = contributors[2].contribute(1, &settings.values(2, 1)).unwrap();
        // The next round waits for everybody, by aggregators with a longer deadline.
        for aggregator in aggregators {
            aggregator.stop().unwrap();
        }
        let patient = Settings { round_deadline: Duration::from_secs(600), ..settings.clone() };
        let aggregators = [patient.aggregator(), patient.aggregator()];
        for contributor in &mut contributors {
            contributor.contribute(2, &settings.values(settings.number(contributor), 2)).unwrap();
        }
        let result = contributors[0].result(2, PATIENCE).unwrap();
        match late {
            LatePolicy::Reject => {
                assert_eq!(outcome, Contributed::Late);
                assert_eq!(origins(&result.entries), [(0, 2), (1, 2), (2, 2)]);
            }
            LatePolicy::Carry => {
                assert_eq!(outcome, Contributed::Carried);
                assert_eq!(origins(&result.entries), [(0, 2), (1, 2), (2, 1), (2, 2)]);
            }
        }
        settings.assert_bits(&result);
        assert!(!contributors[2].result(2, PATIENCE).unwrap().late);
        for aggregator in aggregators {
            aggregator.stop().unwrap();
        }
        settings.assert_recorded(2);
    }
}

#[test]
fn a_contribution_that_was_on_its_way_when_its_round_closed_is_discarded_and_told() {
    let broker = test_broker();
    let round_deadline = Duration::from_millis(200);
    let settings = Settings { quorum: 1, round_deadline, ..Settings::new(job(broker.url(), &unique("half"), 1), 2) };
    let aggregator = settings.aggregator();
    let mut contributors = settings.join_all();
    // The pieces of a contributor that died before it had sent all of them.
    let values = settings.values(1, 1);
    let half = settings.sealed_updates(1, 1, [7; 16], &values);
    send_raw(&settings.job, Topic::Updates, half[..half.len() / 2].to_vec());
    contribute(&settings, &mut contributors[..1], 1);
    let result = contributors[0].result(1, PATIENCE).unwrap();
    assert_eq!(origins(&result.entries), [(0, 1)]);
    eventually("it is discarded", || (aggregator.counters().late == 1).then_some(()));
    aggregator.stop().unwrap();
    let query = AuditQuery { kinds: vec![AuditKind::Late], ..AuditQuery::default() };
    let told = read_audit(&settings.job, &query, PATIENCE).unwrap().records;
    assert_eq!((told.len(), told[0].record.rank, told[0].record.step.0), (1, Some(Rank(1)), 1));
}

#[test]
fn what_is_sent_twice_counts_once() {
    let broker = test_broker();
    let settings = Settings::new(job(broker.url(), &unique("twice"), 1), 3);
    let mut contributors = settings.join_all();
    contribute(&settings, &mut contributors, 1);
    let messages = read_raw(&settings.job, Topic::Updates);
    assert_eq!(messages.len() as u64, settings.pieces(3));
    send_raw(&settings.job, Topic::Updates, messages.clone());
    send_raw(&settings.job, Topic::Rounds, read_raw(&settings.job, Topic::Rounds));
    let aggregator = settings.aggregator();
    settings.assert_results(&mut contributors, 1);
    eventually("all are seen", || (aggregator.counters().duplicates >= settings.pieces(3)).then_some(()));
    settings.exchange(&mut contributors, 2);
    aggregator.stop().unwrap();
    settings.assert_recorded(2);
}

#[test]
fn a_contributor_that_dies_in_the_middle_is_replaced_and_only_one_of_both_counts() {
    let broker = test_broker();
    let settings = Settings::new(job(broker.url(), &unique("dies"), 1), 2);
    let aggregator = settings.aggregator();
    let mut contributors = settings.join_all();
    settings.exchange(&mut contributors, 1);
    // The pieces of the first process, all but the last: it never said that it was done.
    let mut sent = settings.sealed_updates(1, 2, [9; 16], &vec![1e6; settings.elements()]);
    sent.pop();
    send_raw(&settings.job, Topic::Updates, sent);
    contribute(&settings, &mut contributors[..1], 2);
    drop(contributors.pop());
    let mut again = settings.join(1);
    assert_eq!(again.round(), 2, "it knows where to go on");
    assert_eq!(again.result(1, PATIENCE).unwrap().round, 1, "and can have what it missed");
    assert_eq!(again.contribute(2, &settings.values(1, 2)).unwrap(), Contributed::InTime);
    // Once more, as if it had died after that.
    drop(again);
    let mut again = settings.join(1);
    assert_eq!(again.contribute(2, &vec![5.0; settings.elements()]).unwrap(), Contributed::Already);
    contributors.push(again);
    settings.assert_results(&mut contributors, 2);
    settings.exchange(&mut contributors, 3);
    aggregator.stop().unwrap();
    settings.assert_recorded(3);
}

#[test]
fn forged_and_malformed_updates_are_rejected_counted_and_told() {
    let broker = test_broker();
    let settings = Settings::new(job(broker.url(), &unique("forged"), 1), 2);
    let aggregator = settings.aggregator();
    let mut contributors = settings.join_all();
    let values = settings.values(0, 1);
    let good = settings.sealed_updates(0, 1, [3; 16], &values);
    let stranger =
        Settings { job: JobConfig { secret: Secret::from_bytes([9; 32]), ..settings.job.clone() }, ..settings.clone() };
    let launch = Settings { job: JobConfig { instance: [9; 16], ..settings.job.clone() }, ..settings.clone() };
    let larger = Settings { elements: settings.elements * 2, ..settings.clone() };
    let bad = vec![
        ("0".to_owned(), b"noise".to_vec()),
        (good[0].0.clone(), stranger.sealed_updates(0, 1, [3; 16], &values)[0].1.clone()),
        (good[0].0.clone(), launch.sealed_updates(0, 1, [3; 16], &values)[0].1.clone()),
        // A contributor that there is not.
        (good[0].0.clone(), settings.sealed_updates(2, 1, [3; 16], &values)[0].1.clone()),
        // Another shard's key.
        ("1".to_owned(), good[0].1.clone()),
        // A shard that there is not, and one that is larger than the model's.
        larger.sealed_updates(0, 1, [3; 16], &vec![0.0; larger.elements()]).pop().unwrap(),
        (good[0].0.clone(), settings.sealed(0, 53, &[1, 2, 3])),
        (good[0].0.clone(), settings.sealed(0, 48, &[])),
        (good[0].0.clone(), vec![0; 2 << 20]),
    ];
    let count = bad.len() as u64;
    send_raw(&settings.job, Topic::Updates, bad);
    eventually("all are rejected", || (aggregator.counters().rejected == count).then_some(()));
    send_raw(&settings.job, Topic::Rounds, vec![(String::new(), b"noise".to_vec())]);
    send_raw(&settings.job, Topic::Results, vec![(String::new(), b"noise".to_vec())]);
    settings.exchange(&mut contributors, 1);
    assert!(contributors[0].results_rejected() == 1);
    let query = AuditQuery { kinds: vec![AuditKind::Rejected], ..AuditQuery::default() };
    let told = || {
        let entries = read_audit(&settings.job, &query, PATIENCE).unwrap().records;
        let counts = entries.iter().filter_map(|entry| entry.record.detail.split(' ').nth(2)?.parse::<u64>().ok());
        (counts.sum::<u64>() == count).then_some(())
    };
    eventually("all are told", told);
    aggregator.stop().unwrap();
}

#[test]
fn with_little_memory_it_takes_longer_but_not_for_ever() {
    let broker = test_broker();
    let plain = Settings::new(job(broker.url(), &unique("memory"), 1), 4);
    let memory_bytes_max = 4 * 4096 * 4;
    let settings = Settings { memory_bytes_max, ..plain };
    let aggregators = [settings.aggregator(), settings.aggregator()];
    let mut contributors = settings.join_all();
    for round in 1..=2 {
        settings.exchange(&mut contributors, round);
    }
    for aggregator in aggregators {
        aggregator.stop().unwrap();
    }
    let tiny = Settings { memory_bytes_max: memory_bytes_max - 1, ..settings };
    let fault = eventually("it gives up", || tiny.aggregator().wait(Duration::from_secs(5))).unwrap_err();
    assert_eq!(fault.kind, FaultKind::MemoryUnavailable);
}

#[test]
fn links_that_are_lost_in_mid_round_only_delay() {
    let proxy = Proxy::start();
    let settings = Settings::new(job(&proxy.url(), &unique("links"), 1), 3);
    let aggregator = settings.aggregator();
    let mut contributors = settings.join_all();
    settings.exchange(&mut contributors, 1);
    contribute(&settings, &mut contributors[..1], 2);
    proxy.cut();
    let threads: Vec<_> = contributors
        .drain(1..)
        .map(|mut contributor| {
            let settings = settings.clone();
            std::thread::spawn(move || {
                let number = settings.number(&contributor);
                contributor.contribute(2, &settings.values(number, 2)).unwrap();
                contributor
            })
        })
        .collect();
    std::thread::sleep(Duration::from_millis(300));
    proxy.mend();
    contributors.extend(threads.into_iter().map(|thread| thread.join().unwrap()));
    settings.assert_results(&mut contributors, 2);
    // And again and again, whatever is under way.
    let cutter = std::thread::spawn(move || {
        for _ in 0..6 {
            std::thread::sleep(Duration::from_millis(150));
            proxy.cut();
            std::thread::sleep(Duration::from_millis(50));
            proxy.mend();
        }
        proxy
    });
    for round in 3..=6 {
        settings.exchange(&mut contributors, round);
    }
    let _proxy = cutter.join().unwrap();
    assert!(aggregator.counters().links_lost > 0 && contributors[0].links_lost() > 0);
    aggregator.stop().unwrap();
    settings.assert_recorded(6);
}

#[test]
fn a_broker_that_is_killed_in_mid_round_and_kept_its_topics_only_delays() {
    let mut broker = DurableBroker::start_new();
    // Apache Pulsar takes a while to start, on a busy machine.
    let patience = Duration::from_secs(240);
    let settings = Settings { patience, ..Settings::new(job(&broker.url(), &unique("restart"), 1), 3) };
    let aggregators = [settings.aggregator(), settings.aggregator()];
    let mut contributors = settings.join_all();
    settings.exchange(&mut contributors, 1);
    for round in 2..=3 {
        contribute(&settings, &mut contributors[..1], round);
        broker.kill();
        let rest: Vec<_> = contributors
            .drain(1..)
            .map(|mut contributor| {
                let settings = settings.clone();
                std::thread::spawn(move || {
                    contribute(&settings, std::slice::from_mut(&mut contributor), round);
                    contributor
                })
            })
            .collect();
        broker.start();
        contributors.extend(rest.into_iter().map(|thread| thread.join().unwrap()));
        settings.assert_results(&mut contributors, round);
    }
    for aggregator in aggregators {
        aggregator.stop().unwrap();
    }
    settings.assert_recorded(3);
}

#[test]
fn a_broker_that_lost_the_log_is_named_on_all() {
    let broker = embedded_broker();
    let address = broker.address();
    let settings = Settings::new(job(broker.url(), &unique("lost"), 1), 2);
    let aggregator = settings.aggregator();
    let mut contributors = settings.join_all();
    settings.exchange(&mut contributors, 1);
    drop(broker);
    let config = gradwire_control::BrokerConfig::new(address);
    let _broker = eventually("the port", || gradwire_control::EmbeddedBroker::start(config.clone()).ok());
    for contributor in &mut contributors {
        let fault = contributor.result(2, PATIENCE).unwrap_err();
        assert_eq!(fault.kind, FaultKind::Diverged, "{fault}");
    }
    let fault = aggregator.wait(PATIENCE).expect("it ends").unwrap_err();
    assert_eq!(fault.kind, FaultKind::Diverged, "{fault}");
}

#[test]
fn who_is_missing_is_named_at_the_deadline() {
    let broker = test_broker();
    let settings = Settings::new(job(broker.url(), &unique("missing"), 1), 3);
    let mut contributors = settings.join_all();
    contribute(&settings, &mut contributors[..2], 1);
    let soon = Duration::from_millis(500);
    let fault = contributors[0].result(1, soon).unwrap_err();
    assert_eq!(fault.kind, FaultKind::DeadlineExceeded);
    assert!(fault.detail.contains("missing: 2") && fault.detail.contains("2 of 3"), "{fault}");
    contribute(&settings, &mut contributors[2..], 1);
    let fault = contributors[0].result(1, soon).unwrap_err();
    assert!(fault.detail.contains("gradwire aggregate"), "{fault}");
    let fault = contributors[0].result(2, soon).unwrap_err();
    assert!(fault.detail.contains("the job is at round 1"), "{fault}");
    let fault = contributors[0].contribute(3, &settings.values(0, 3)).unwrap_err();
    assert_eq!(fault.kind, FaultKind::InvalidArgument, "{fault}");
    let fault = contributors[0].contribute(1, &[1.0]).unwrap_err();
    assert_eq!(fault.kind, FaultKind::InvalidArgument, "{fault}");
    // It was not for nothing.
    let _aggregator = settings.aggregator();
    settings.assert_results(&mut contributors, 1);
}

#[test]
fn who_means_another_job_is_told() {
    let broker = test_broker();
    let settings = Settings::new(job(broker.url(), &unique("other"), 1), 2);
    let _first = settings.join(0);
    let with = |change: fn(&mut ContributorConfig)| {
        let mut config = settings.contributor(1);
        change(&mut config);
        Contributor::join(config).unwrap_err().kind
    };
    assert_eq!(with(|config| config.contributors = 3), FaultKind::WorldMismatch);
    assert_eq!(with(|config| config.elements += 1), FaultKind::ShapeMismatch);
    assert_eq!(with(|config| config.wire = WireFormat::Bf16), FaultKind::OperationMismatch);
    assert_eq!(with(|config| config.late = LatePolicy::Carry), FaultKind::OperationMismatch);
    assert_eq!(with(|config| config.job.secret = Secret::from_bytes([9; 32])), FaultKind::SecretMismatch);
    let mut config = settings.aggregator_config();
    config.expected.contributors = Some(5);
    let fault = Aggregator::start(config).unwrap().wait(PATIENCE).expect("it ends").unwrap_err();
    assert_eq!(fault.kind, FaultKind::WorldMismatch, "{fault}");
}

#[test]
fn an_unreachable_broker_is_named_with_the_reason() {
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let settings = Settings::new(job(&format!("pulsar://{nobody}"), "unreachable", 1), 1);
    let config = ContributorConfig { deadline: Duration::from_millis(500), ..settings.contributor(0) };
    let fault = Contributor::join(config).unwrap_err();
    assert_eq!(fault.kind, FaultKind::BrokerUnreachable);
    assert!(fault.detail.contains(&nobody.to_string()), "{fault}");
    let aggregator = settings.aggregator_config();
    let aggregator = Aggregator::start(aggregator).unwrap();
    eventually("it says why", || aggregator.unlinked());
    aggregator.stop().unwrap();
}

#[test]
fn results_of_a_round_that_nobody_kept_up_with_can_be_had_later() {
    let broker = test_broker();
    let settings = Settings {
        quorum: 1,
        round_deadline: Duration::from_millis(1),
        ..Settings::new(job(broker.url(), &unique("behind"), 1), 2)
    };
    let aggregator = settings.aggregator();
    let mut contributors = settings.join_all();
    for round in 1..=5 {
        contribute(&settings, &mut contributors[..1], round);
        settings.assert_bits(&contributors[0].result(round, PATIENCE).unwrap());
    }
    // The other one read nothing all the time.
    for round in [1, 2, 5, 3] {
        let result = contributors[1].result(round, PATIENCE).unwrap();
        assert_eq!((result.round, result.late, origins(&result.entries)), (round, true, vec![(0, round)]));
        settings.assert_bits(&result);
    }
    aggregator.stop().unwrap();
    let versions = read_versions(&settings.job, &VersionQuery::default(), PATIENCE).unwrap().records;
    assert!(versions.iter().all(|version| version.contributors == [Rank(0)] && version.step.0 <= Round(5).0));
}
