//! Plans that broke an invariant once, each by a bug that has been mended since. What it was is in the name of the file.

use gradwire_sim::{Plan, simulate_twice};

#[test]
fn plans_that_failed_once_hold() {
    let plans = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/plans");
    let mut count = 0;
    for file in std::fs::read_dir(plans).expect("the plans are there") {
        let file = file.expect("it can be read").path();
        let text = std::fs::read_to_string(&file).expect("it is text");
        let plan = Plan::from_text(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        assert_eq!(simulate_twice(&plan, None).violation, None, "{}", file.display());
        count += 1;
    }
    assert!(count >= 12);
}
