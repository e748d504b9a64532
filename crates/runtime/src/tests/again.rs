//! Steps that are done again by fewer ranks, seen by a trainer that has results of the first time.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use gradwire_proto::member::Endpoint;
use gradwire_proto::membership::{Member, View};
use gradwire_proto::session::Recovery;
use gradwire_proto::{DType, Epoch, Rank};

use super::{boxed, run, tcp};
use crate::handle::Tensor;
use crate::{Builder, Group, TensorSpec};

/// The others go on without rank 2.
fn without_the_last() -> View {
    let member = |rank: u32| Member { rank: Rank(rank), id: [rank as u8; 16], endpoint: Endpoint::default() };
    View { epoch: Epoch(2), id: [2; 16], members: (0..2).map(member).collect() }
}

fn builder() -> Builder {
    Builder::for_tests().recovery(Recovery::Redo)
}

fn reduce(group: &Group, tensor: &Tensor) -> f32 {
    let mut data = group.buffer(tensor).expect("a buffer");
    data.as_mut_slice::<f32>().fill((group.rank().0 + 1) as f32);
    group.submit(tensor, data).expect("taken").wait().expect("reduced").output.as_slice::<f32>()[0]
}

/// Enters the epoch, and drives this rank until the operation that was done is in flight once more, and what this rank has
/// to send for it is on its way.
fn do_again(engine: &mut crate::engine::Engine) {
    engine.set_view(without_the_last());
    let limit = Instant::now() + Duration::from_secs(30);
    while engine.is_idle() && Instant::now() < limit {
        engine.progress();
    }
    assert!(!engine.is_idle(), "it is done again");
    // So long it waits for others to share a frame with.
    std::thread::sleep(Duration::from_millis(2));
    engine.progress();
}

/// Found across processes: the commit of a trainer that had waited for all its operations was refused with TensorBusy.
/// And with everything in one poll, the step became final before its last result was among those that replace others, which
/// then came with the next step.
#[test]
fn the_result_of_a_step_that_is_done_again_comes_with_its_commit() {
    for slow in [0, 1] {
        let (all_done, entered) = (Barrier::new(3), Barrier::new(3));
        let sums = run(3, boxed(tcp(3)), builder, |group| {
            let specs = [TensorSpec::new("t", &[10], DType::F32)];
            let tensor = group.declare(&specs).expect("declared").remove(0);
            assert_eq!(reduce(group, &tensor), 6.0);
            all_done.wait();
            let rank = group.rank().0;
            if rank == 2 {
                entered.wait();
                return Vec::new();
            }
            if rank == slow {
                // All that the other one says comes in one poll.
                group.driver.with_engine(|engine| {
                    do_again(engine);
                    std::thread::sleep(Duration::from_millis(500));
                    engine.begin_commit(Duration::from_secs(30), 0).expect("begun");
                    engine.progress();
                });
                group.driver.drive_to(None, |engine| !engine.is_committing());
                let committed = group.driver.with_engine(crate::engine::Engine::take_commit).expect("final");
                assert_eq!(committed.made.contributors, [Rank(0), Rank(1)]);
                entered.wait();
                return committed.replaced.iter().map(|(_, output, _)| output.as_slice::<f32>()[0]).collect();
            }
            group.driver.with_engine(|engine| engine.set_view(without_the_last()));
            let commit = group.commit().expect("final");
            entered.wait();
            assert_eq!(commit.contributors, [Rank(0), Rank(1)]);
            commit.replaced.iter().map(|replaced| replaced.output.as_slice::<f32>()[0]).collect()
        });
        assert_eq!(sums, [vec![3.0], vec![3.0], vec![]], "rank {slow} is slow");
    }
}

/// What a trainer does with a tensor whose operation is done again waits for that.
#[test]
fn a_tensor_may_be_used_again_while_its_operation_is_done_again() {
    let (all_done, over) = (Barrier::new(3), Barrier::new(3));
    run(3, boxed(tcp(3)), builder, |group| {
        let tensor = group.declare(&[TensorSpec::new("t", &[10], DType::F32)]).expect("declared").remove(0);
        assert_eq!(reduce(group, &tensor), 6.0);
        all_done.wait();
        if group.rank().0 < 2 {
            group.driver.with_engine(do_again);
            assert_eq!(reduce(group, &tensor), 3.0);
            let replaced = group.commit().expect("final").replaced;
            assert_eq!(replaced.iter().map(|one| one.output.as_slice::<f32>()[0]).collect::<Vec<_>>(), [3.0]);
        }
        over.wait();
    });
}
