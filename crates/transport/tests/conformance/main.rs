//! One suite for all transports: what the trait promises is tested for every backend, and for what wraps them.
//!
//! Tests are generic over a [`fixture::Fixture`]; `conformance!` instantiates them per backend. What a backend does
//! not offer is tested to be refused, and the skip is printed.

mod child;
mod cluster;
mod death;
mod faults;
mod fixture;
mod leaks;
mod limits;
mod measure;
mod order;
mod process;
mod sleep;
mod sys;
mod writes;

#[global_allocator]
static ALLOCATOR: sys::Counting = sys::Counting;

macro_rules! conformance {
    ($backend:ident: $fixture:ty { $($area:ident: $($test:ident)*;)* }) => {
        mod $backend {
            $($(
                #[test]
                fn $test() {
                    let _running = crate::process::shared();
                    crate::$area::$test::<$fixture>();
                }
            )*)*
        }
    };
    ($($backend:ident: $fixture:ty;)*) => {
        $(conformance!($backend: $fixture {
            order:
                messages_and_writes_arrive_in_order
                a_full_queue_gives_back_and_loses_nothing
                four_peers_at_once;
            limits:
                capabilities_are_true
                empty_and_largest
                over_the_limit_is_invalid
                without_a_link_nothing_is_taken;
            writes:
                a_payload_is_there_before_its_notice
                writes_out_of_bounds_are_discarded
                writes_can_be_refused
                sources_outlive_their_buffers
                regions_can_be_read_in_place
                steady_state_does_not_allocate;
            death:
                what_arrived_before_the_end_is_delivered
                every_token_comes_back_once_when_a_peer_is_gone
                disconnecting_drops_what_is_queued
                a_link_can_come_back
                a_killed_peer_is_noticed;
            sleep:
                news_wake_a_sleeper
                the_end_wakes_a_sleeper
                room_and_completions_wake_a_sleeper
                no_wake_up_is_lost;
            leaks:
                regions_come_and_go;
        });)*
    };
}

conformance! {
    tcp: crate::fixture::Tcp;
    shm: crate::fixture::Shm;
    faulty_tcp: crate::fixture::PassThrough<crate::fixture::Tcp>;
    faulty_shm: crate::fixture::PassThrough<crate::fixture::Shm>;
}

/// What counts descriptors, mappings and memory of the whole process runs alone.
mod alone {
    #[test]
    fn tcp_reconnects_without_a_leak() {
        let _running = crate::process::exclusive();
        crate::leaks::ten_thousand_reconnects::<crate::fixture::Tcp>();
    }

    #[test]
    fn shm_reconnects_without_a_leak() {
        let _running = crate::process::exclusive();
        crate::leaks::ten_thousand_reconnects::<crate::fixture::Shm>();
    }

    #[test]
    fn shm_regions_leave_nothing_behind() {
        let _running = crate::process::exclusive();
        crate::leaks::regions_leave_nothing_behind::<crate::fixture::Shm>();
    }

    #[test]
    fn tcp_regions_leave_nothing_behind() {
        let _running = crate::process::exclusive();
        crate::leaks::regions_leave_nothing_behind::<crate::fixture::Tcp>();
    }
}
