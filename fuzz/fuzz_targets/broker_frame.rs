//! See `entry::broker_frame`.
#![no_main]

#[allow(dead_code, reason = "one entry per target")]
#[path = "../../crates/control/tests/entry/mod.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| entry::broker_frame(bytes));
