//! The main job, as users run it.

use std::process::Command;

use gradwire_tests::binary;

/// Enough to learn what a demo has to; the default is six times as many.
const STEPS: &str = "100";

fn demo(arguments: &[&str]) -> serde_json::Value {
    let output =
        Command::new(binary("gradwire")).arg("demo").args(arguments).args(["--json", "-"]).output().expect("runs");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{arguments:?}: {}\n{out}\n{err}", output.status);
    serde_json::from_str(&out).unwrap_or_else(|error| panic!("{arguments:?} printed more than JSON ({error}): {out}"))
}

#[test]
fn every_number_of_ranks_transport_and_wire_format_trains_to_the_reference_bits() {
    for ranks in ["1", "2", "3", "4", "7"] {
        for wire in ["fp32", "fp16", "bf16"] {
            let mut hashes = Vec::new();
            for transport in ["shm", "tcp"] {
                let report = demo(&["--ranks", ranks, "--transport", transport, "--wire", wire, "--steps", STEPS]);
                let case = format!("{ranks} ranks, {transport}, {wire}: {report}");
                assert_eq!(report["weights_sha256"], report["reference_sha256"], "{case}");
                assert!(report["accuracy"].as_f64().is_some_and(|accuracy| accuracy >= 0.90), "{case}");
                assert_eq!(report["epoch"], 1, "{case}");
                hashes.push(report["weights_sha256"].clone());
            }
            assert_eq!(hashes[0], hashes[1], "the transport must not show in the bits");
        }
    }
}

#[test]
fn what_a_user_gets_without_a_word_has_learned() {
    let report = demo(&[]);
    assert_eq!(report["weights_sha256"], report["reference_sha256"], "{report}");
    assert!(report["accuracy"].as_f64().is_some_and(|accuracy| accuracy >= 0.95), "{report}");
}

#[test]
fn what_cannot_be_is_refused_with_a_clear_word() {
    for (arguments, word) in [
        (["--ranks", "0"], "ranks"),
        (["--steps", "0"], "steps"),
        (["--wire", "fp8"], "fp16"),
        (["--transport", "x"], "shm"),
    ] {
        let output = Command::new(binary("gradwire")).arg("demo").args(arguments).output().expect("runs");
        assert!(!output.status.success(), "{arguments:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(word), "{arguments:?}: {output:?}");
    }
}
