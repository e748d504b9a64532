//! The dispatcher as a state machine.
