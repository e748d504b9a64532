//! What every rank gets: the right bits, whatever the transport, the wire format and the number of ranks.

use gradwire_tests::{Job, Plan, assert_same_verdict};

#[test]
fn every_collective_type_and_size_gives_the_reference_bits_on_every_rank() {
    for world_size in [1, 2, 3] {
        let mut verdicts = Vec::new();
        for transport in ["shm", "tcp"] {
            verdicts.push(assert_same_verdict(&Plan::new(world_size, transport).run(&["exchange", "3"])));
        }
        assert_eq!(verdicts[0], verdicts[1], "the transport must not show in the bits");
    }
}

#[test]
fn half_precision_on_the_wire_gives_the_reference_bits_too() {
    for (wire, transport) in [("fp16", "shm"), ("bf16", "tcp"), ("fp16", "tcp")] {
        assert_same_verdict(&Plan::new(3, transport).with("GRADWIRE_WIRE", wire).run(&["exchange", "2"]));
    }
}

#[test]
fn checking_shared_memory_too_changes_no_bit() {
    let plain = assert_same_verdict(&Plan::new(2, "shm").run(&["exchange", "2"]));
    let checked = Plan::new(2, "shm").with("GRADWIRE_INTEGRITY", "all").run(&["exchange", "2"]);
    assert_eq!(plain, assert_same_verdict(&checked));
}

#[test]
fn steps_go_on_beyond_32_bits() {
    assert_same_verdict(&Plan::new(2, "tcp").run(&["resume"]));
}

#[test]
fn sums_that_half_precision_gets_wrong_elsewhere() {
    for transport in ["shm", "tcp"] {
        let said = assert_same_verdict(&Plan::new(4, transport).with("GRADWIRE_WIRE", "fp16").run(&["small-halves"]));
        let expected = "ok [2052.0, 2052.0, 2052.0, 2052.0] [40000.0] false [inf] true [NaN, inf] true";
        assert_eq!(said, expected, "{transport}");
    }
}

#[test]
fn ten_thousand_steps_leave_memory_descriptors_and_threads_flat() {
    for transport in ["shm", "tcp"] {
        assert_same_verdict(&Plan::new(2, transport).run(&["many-steps", "10000"]));
    }
}

#[test]
fn steady_state_does_not_allocate() {
    for transport in ["shm", "tcp"] {
        let plan = Plan::new(2, transport);
        let ended = Job::start((0..2).map(|rank| plan.command_of("e2e-steady", rank, &[]))).wait();
        assert_eq!(assert_same_verdict(&ended), "ok 0 allocations", "{transport}");
    }
}

#[test]
#[ignore = "needs 18 GiB of memory: cargo test --package gradwire-tests -- --ignored large"]
fn a_large_tensor_has_more_elements_than_31_bits_can_count() {
    for transport in ["shm", "tcp"] {
        let plan = Plan::new(2, transport).with("GRADWIRE_DEADLINE_MS", 110_000);
        assert_same_verdict(&plan.run(&["large"]));
    }
}
