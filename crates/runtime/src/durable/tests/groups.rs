//! Saving and restoring as a group, of threads over real links.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

use gradwire_proto::DType;
use gradwire_proto::session::Recovery;

use super::super::disk::Operation;
use super::*;
use crate::tests::{boxed, run, tcp};
use crate::{Builder, Group, TensorSpec};

fn group<R: Send>(ranks: u32, first_step: u64, act: impl Fn(&Group) -> R + Sync) -> Vec<R> {
    run(ranks, boxed(tcp(ranks)), || Builder::for_tests().first_step(Step(first_step)), act)
}

fn assert_goes_on(group: &Group) {
    let tensor = group.declare(&[TensorSpec::new("after", &[1], DType::F32)]).expect("declared").remove(0);
    let mut ones = [1.0f32];
    group.allreduce_slice(&tensor, &mut ones).expect("the group goes on");
    assert_eq!(ones[0], group.world_size() as f32);
}

#[test]
fn what_some_ranks_saved_any_number_of_ranks_restores() {
    let directory = TempDir::new().expect("a directory");
    let path = directory.path().join("made/by/the/first");
    group(3, 0, |group| {
        for step in 1..=4 {
            assert!(group.commit().expect("committed").replaced.is_empty());
            let saved = group.save(&path, &Parts::new(step)).expect("saved");
            assert_eq!((saved.step, saved.bytes), (Step(step), 30_017));
            assert_eq!(latest(&path).step(), Step(step), "it is there when save returns");
        }
        assert_goes_on(group);
    });
    assert_eq!(entries(&path), ["save-000003-step-3", "save-000004-step-4"]);
    for ranks in [1, 2, 5] {
        group(ranks, 4, |group| {
            let mut state = Parts::empty();
            let restored = group.restore(&latest(&path), &mut state).expect("restored");
            assert_eq!((restored.step, state), (Step(4), Parts::new(4)));
            assert_goes_on(group);
        });
    }
}

#[test]
fn a_rank_that_cannot_write_is_named_on_all_with_the_reason_and_the_group_goes_on() {
    for odd in 0..3 {
        let directory = saved(&[]);
        let blocked = directory.path().join("file");
        fs::write(&blocked, "no directory").expect("written");
        let good = directory.path().join("saves");
        group(3, 0, |group| {
            let path = if group.rank().0 == odd { &blocked } else { &good };
            let fault = group.save(path, &Parts::new(0)).expect_err("a rank cannot save");
            assert_eq!((fault.kind, fault.rank), (FaultKind::NotSaved, Some(Rank(odd))), "{fault}");
            assert!(fault.detail.contains("file cannot be read: Not a directory"), "{fault}");
            group.barrier().expect("the group goes on");
            group.save(&good, &Parts::new(0)).expect("saved");
            assert_goes_on(group);
        });
        assert_eq!(assert_whole(&good), 0, "the group had made no step");
    }
}

#[test]
fn what_was_saved_is_saved_until_the_next_commit() {
    for recovery in [Recovery::Fail, Recovery::Abort, Recovery::Redo] {
        let directory = saved(&[]);
        let (path, other) = (directory.path().join("saves"), directory.path().join("other"));
        let blocked = directory.path().join("file");
        fs::write(&blocked, "no directory").expect("written");
        let builder = || Builder::for_tests().recovery(recovery);
        run(3, boxed(tcp(3)), builder, |group| {
            let _ = group.commit().expect("committed");
            let first = group.save(&path, &Parts::new(1)).expect("saved");
            for _ in 0..2 {
                let again = group.save(&path, &Parts::new(1)).expect("it was saved");
                assert_eq!((again.step, &again.path, again.bytes), (first.step, &first.path, first.bytes));
            }
            assert_eq!(entries(&path), ["save-000001-step-1"], "nothing was written again");
            group.barrier().expect("all have looked");
            // In a job that fails without a rank these are made, for nothing has to be done again there.
            let changed = group.save(&path, &Parts::new(2));
            let elsewhere = group.save(&other, &Parts::new(1));
            if recovery == Recovery::Fail {
                assert_eq!(changed.expect("saved").path, path.join("save-000002-step-1"));
                assert_eq!(elsewhere.expect("saved").path, other.join("save-000001-step-1"));
            } else {
                for (ended, words) in [(changed, "was changed after it was saved as"), (elsewhere, "was saved in")] {
                    let fault = ended.expect_err("not twice");
                    assert!(fault.kind == FaultKind::InvalidArgument && fault.detail.contains(words), "{fault}");
                }
            }
            let _ = group.commit().expect("committed");
            assert_eq!(group.save(&path, &Parts::new(2)).expect("saved").step, Step(2));
            assert_goes_on(group);
        });
        assert_eq!(latest(&path).step(), Step(2));
        run(2, boxed(tcp(2)), builder, |group| {
            let fault = group.save(&blocked, &Parts::new(0)).expect_err("it cannot be made");
            let again = group.save(&blocked, &Parts::new(0)).expect_err("nor now");
            assert_eq!((again.kind, again.rank), (fault.kind, fault.rank), "{again}");
            let waits =
                again.detail.starts_with("it is not tried again before the next commit: the state was not saved");
            assert_eq!(waits, recovery != Recovery::Fail, "{again}");
        });
    }
}

#[test]
fn what_was_saved_and_is_gone_is_not_taken_for_saved() {
    let directory = saved(&[]);
    group(1, 0, |group| {
        let saved = group.save(directory.path(), &Parts::new(0)).expect("saved");
        fs::remove_file(saved.path.join("rank-0")).expect("removed");
        let fault = group.save(directory.path(), &Parts::new(0)).expect_err("it is gone");
        assert_eq!(fault.kind, FaultKind::NotSaved);
        assert!(
            fault.detail.contains("is not there any more: ") && fault.detail.contains("rank-0: it is missing"),
            "{fault}"
        );
    });
}

#[test]
fn a_disk_that_is_full_at_any_moment_is_reported_by_all_and_leaves_nothing() {
    for odd in [0, 1] {
        let mut operations = 0;
        loop {
            let directory = saved(&[]);
            let passed = AtomicUsize::new(0);
            let full = |_: Operation<'_>| {
                let error = io::Error::from_raw_os_error(rustix::io::Errno::NOSPC.raw_os_error());
                if passed.fetch_add(1, Ordering::Relaxed) == operations { Err(error) } else { Ok(()) }
            };
            let path = directory.path();
            let ended = group(2, 0, |group| {
                let disk = if group.rank().0 == odd { Disk::watched(&full) } else { Disk::real() };
                let ended = group.save_on(disk, path, &Parts::new(0));
                assert_goes_on(group);
                ended
            });
            if passed.load(Ordering::Relaxed) <= operations {
                assert!(operations > 5 && ended.iter().all(Result::is_ok), "{ended:?}");
                break;
            }
            for fault in ended.iter().filter_map(|ended| ended.as_ref().err()) {
                assert_eq!((fault.kind, fault.rank), (FaultKind::NotSaved, Some(Rank(odd))), "{fault}");
                assert!(fault.detail.contains("No space left on device"), "{fault}");
            }
            assert_eq!(ended[0].is_ok(), ended[1].is_ok(), "after {operations}: {ended:?}");
            let found = SavedState::latest(path).expect("readable");
            assert_eq!(ended[0].is_ok(), found.is_some(), "after {operations}: {ended:?}");
            operations += 1;
        }
    }
}

#[test]
fn ranks_that_do_not_save_the_same_are_named() {
    let directory = saved(&[]);
    let path = directory.path();
    group(3, 0, |group| {
        let mut state = Parts::new(1);
        if group.rank().0 == 2 {
            state.0[2].1.push(0);
        }
        let fault = group.save(path, &state).expect_err("another state");
        assert_eq!((fault.kind, fault.rank), (FaultKind::NotSaved, Some(Rank(2))), "{fault}");
        assert!(fault.detail.contains("other parts, or of other lengths, than that of rank 0"), "{fault}");
        let elsewhere = path.join("elsewhere");
        let fault = group.save(if group.rank().0 == 1 { &elsewhere } else { path }, &Parts::new(1));
        let fault = fault.expect_err("another directory");
        assert_eq!((fault.kind, fault.rank), (FaultKind::NotSaved, Some(Rank(1))), "{fault}");
        assert!(fault.detail.contains("rank-1: it is missing; all ranks must see the same directory"), "{fault}");
        assert_goes_on(group);
    });
    assert!(SavedState::latest(path).expect("readable").is_none());
}

#[test]
fn ranks_that_do_not_restore_the_same_are_named() {
    let directory = saved(&[3, 4]);
    let before = SavedState::open(&directory.path().join("save-000001-step-3")).expect("whole");
    group(3, 4, |group| {
        let saved = if group.rank().0 == 1 { before.clone() } else { latest(directory.path()) };
        let fault = group.restore(&saved, &mut Parts::empty()).expect_err("another save");
        assert_eq!((fault.kind, fault.rank), (FaultKind::NotRestored, Some(Rank(1))), "{fault}");
        assert!(fault.detail.contains("save-000001-step-3 (step 3), but rank 0 another save"), "{fault}");
        assert_goes_on(group);
    });
    group(2, 5, |group| {
        let fault = group.restore(&latest(directory.path()), &mut Parts::empty()).expect_err("another step");
        assert!(fault.detail.contains("goes on with step 4, but the group is at step 5: connect with"), "{fault}");
    });
    group(2, 4, |group| {
        let mut state = Parts::empty();
        if group.rank().0 == 1 {
            state.0.pop();
        }
        let fault = group.restore(&latest(directory.path()), &mut state).expect_err("another state");
        assert_eq!(fault.rank, Some(Rank(1)), "{fault}");
        assert!(fault.detail.contains("a part 'seed' of 16 bytes, which the state has not"), "{fault}");
    });
}

#[test]
fn a_save_of_another_version_of_the_model_is_refused() {
    let directory = saved(&[]);
    let state = Parts::new(0);
    let call = call(directory.path(), &state, 0, 1);
    let header = call.header(Rank(0)).expect("a member");
    write_shard(Disk::real(), &call.unfinished(directory.path()), &header, &state.parts()).expect("written");
    let of_v2 = SaveIdentity { model_version: "v2".into(), ..identity() };
    publish(Disk::real(), directory.path(), call.name, &mut call.manifest(&state.parts(), 1, &of_v2))
        .expect("published");
    group(1, 0, |group| {
        let saved = latest(directory.path());
        let fault = group.restore(&saved, &mut Parts::empty()).expect_err("another model");
        assert!(fault.detail.contains("is of version 'v2' of the model, but this job of no version"), "{fault}");
        saved.restore_into(&mut Parts::empty()).expect("it is taken where nobody asks");
    });
}
