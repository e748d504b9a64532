//! See `entry::transfer`.
#![no_main]

#[allow(dead_code, reason = "one entry per target")]
#[path = "../../crates/proto/tests/entry/mod.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| entry::transfer(bytes));
