//! Programs that use gradwire start under the launchers that people have.

use std::process::{Command, Output, Stdio};

use gradwire_tests::binary;

fn assert_all_ok(output: &Output, ranks: usize) {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    let verdicts: Vec<&str> = out.lines().filter_map(|line| line.split("ok ").nth(1)).collect();
    assert_eq!(verdicts.len(), ranks, "{out}\n{err}");
    assert!(verdicts.iter().all(|verdict| *verdict == verdicts[0]), "{out}");
}

#[test]
fn gradwire_launch_starts_them() {
    for transport in ["auto", "shm", "tcp"] {
        let output = Command::new(binary("gradwire"))
            .args(["launch", "-n", "4", "--transport", transport, "--"])
            .arg(binary("e2e-rank"))
            .args(["exchange", "1"])
            .output()
            .expect("gradwire runs");
        assert_all_ok(&output, 4);
    }
}

#[test]
fn openmpis_mpirun_starts_them_by_its_environment_alone() {
    let output = Command::new("mpirun")
        .args(["--allow-run-as-root", "--oversubscribe", "-n", "4"])
        .arg(binary("e2e-rank"))
        .args(["exchange", "1"])
        .output()
        .expect("mpirun is installed by ci/setup --test");
    assert_all_ok(&output, 4);
}

#[test]
fn torchruns_and_sruns_variables_start_them() {
    let common = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29501")];
    let torchrun: &dyn Fn(&mut Command, &str) = &|command, rank| {
        command.envs(common).env("RANK", rank).env("LOCAL_RANK", rank).env("WORLD_SIZE", "3");
        command.env("LOCAL_WORLD_SIZE", "3").env("GROUP_RANK", "0").env("TORCHELASTIC_RUN_ID", "none");
        command.env("TORCHELASTIC_RESTART_COUNT", "0");
    };
    let srun: &dyn Fn(&mut Command, &str) = &|command, rank| {
        command.env("SLURM_PROCID", rank).env("SLURM_LOCALID", rank).env("SLURM_NTASKS", "3");
        command.env("SLURM_JOB_ID", "4711").env("SLURM_STEP_ID", "0").env("SLURM_NNODES", "1");
        command.env("SLURM_STEP_NUM_TASKS", "3").env("SLURM_STEP_NUM_NODES", "1").env("SLURM_NODEID", "0");
        command.env("SLURM_TASKS_PER_NODE", "3").env("SLURM_STEP_TASKS_PER_NODE", "3");
    };
    for variables in [torchrun, srun] {
        let children: Vec<_> = ["0", "1", "2"]
            .into_iter()
            .map(|rank| {
                let mut command = Command::new(binary("e2e-rank"));
                command.args(["exchange", "1"]).stdout(Stdio::piped()).stderr(Stdio::piped());
                variables(&mut command, rank);
                command.spawn().expect("starts")
            })
            .collect();
        for child in children {
            assert_all_ok(&child.wait_with_output().expect("ends"), 1);
        }
    }
}

#[test]
fn a_variable_that_nobody_reads_is_told_of_once() {
    let saves = tempfile::tempdir().expect("a directory");
    // In two words: what is named here as one has to be known.
    let misspelt = format!("GRADWIRE_{}", "TRANSPROT");
    // This one logs.
    let mut command = Command::new(binary("example-elastic"));
    command.arg(saves.path()).args(["3", "0"]).env(&misspelt, "tcp").env("GRADWIRE_TEST_SEED", "1");
    let output = command.output().expect("runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let words = format!(
        "the variable {misspelt} is set, but there is none of this name in gradwire: is GRADWIRE_TRANSPORT meant?"
    );
    assert_eq!(said.matches(&words).count(), 1, "{said}");
    assert_eq!(said.matches("the variable ").count(), 1, "{said}");
}
