use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

type Map = HashMap<String, String>;

fn map(pairs: &[(&str, &str)]) -> Map {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

fn position(pairs: &[(&str, &str)]) -> Result<Position, Fault> {
    let map = map(pairs);
    Position::find(&|name| map.get(name).cloned())
}

fn place(pairs: &[(&str, &str)]) -> Result<Place, Fault> {
    let map = map(pairs);
    discover(&|name| map.get(name).cloned(), Duration::from_millis(50))
}

/// (rank, world, local rank, local world, launcher)
fn short(position: &Position) -> (u32, u32, u32, u32, Launcher) {
    (position.rank.0, position.world_size, position.local_rank, position.local_world_size, position.launcher)
}

const SECRET: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
const INSTANCE: &str = "00112233445566778899aabbccddeeff";

#[test]
fn without_a_launcher_it_is_a_job_of_one() {
    let place = place(&[]).unwrap();
    assert_eq!((place.rank, place.world_size, place.launcher), (Rank(0), 1, Launcher::None));
    assert!(place.broker.is_none());
    assert!(place.job.as_str().starts_with("job-"));
}

/// Found by a user: slots that were added to the host on which the job began.
#[test]
fn ranks_beyond_those_that_a_job_began_with_are_further_ones_on_their_host() {
    let place = |local: &str, most: &str| {
        let names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GRADWIRE_RANKS_MAX"];
        let values = ["3", "3", "3", local, most];
        position(&names.into_iter().zip(values).collect::<Vec<_>>()).map(|position| short(&position))
    };
    let (rank, world, local_rank, local_world, _) = place("4", "5").unwrap();
    assert_eq!((rank, world, local_rank, local_world), (3, 3, 3, 4));
    assert_eq!(place("3", "5").unwrap().3, 4, "it is one more");
    assert_eq!(place("6", "5").unwrap_err().kind, FaultKind::WorldMismatch);
    assert_eq!(place("4", "3").unwrap_err().kind, FaultKind::WorldMismatch);
}

#[test]
fn gradwire_launch_gives_everything() {
    let place = place(&[
        ("RANK", "5"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "4"),
        ("GRADWIRE_JOB", "j"),
        ("GRADWIRE_INSTANCE", INSTANCE),
        ("GRADWIRE_SECRET", SECRET),
        ("GRADWIRE_BROKER", "pulsar://h:1"),
        ("GRADWIRE_BROKER_TOKEN", "t"),
        ("GRADWIRE_ADDRESS", "10.0.0.1"),
        // What an outer launcher left does not count.
        ("OMPI_COMM_WORLD_RANK", "0"),
        ("OMPI_COMM_WORLD_SIZE", "1"),
    ])
    .unwrap();
    assert_eq!((place.rank, place.world_size, place.local_rank, place.local_world_size), (Rank(5), 8, 1, 4));
    assert_eq!((place.job.as_str(), place.launcher), ("j", Launcher::Gradwire));
    assert_eq!(hex(&place.instance), INSTANCE);
    assert_eq!(place.secret.to_hex(), SECRET);
    assert_eq!(place.broker, Some(BrokerAccess::new("pulsar://h:1").with_token(Token::Text("t".to_owned()))));
    assert_eq!(place.address, Some(IpAddr::from([10, 0, 0, 1])));
    assert!(!format!("{place:?}").contains(SECRET));
    assert!(!format!("{place:?}").contains("\"t\""));
}

#[test]
fn every_launcher_is_understood() {
    let torchrun = [
        ("RANK", "3"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("TORCHELASTIC_RUN_ID", "none"),
        ("MASTER_PORT", "29500"),
    ];
    assert_eq!(short(&position(&torchrun).unwrap()), (3, 4, 1, 2, Launcher::Torchrun));
    let openmpi = [
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "4"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
        ("PMIX_NAMESPACE", "316538881"),
    ];
    assert_eq!(short(&position(&openmpi).unwrap()), (1, 4, 1, 4, Launcher::OpenMpi));
    let hydra = [("PMI_RANK", "2"), ("PMI_SIZE", "4"), ("MPI_LOCALRANKID", "0"), ("MPI_LOCALNRANKS", "2")];
    assert_eq!(short(&position(&hydra).unwrap()), (2, 4, 0, 2, Launcher::Pmi));
    let by_hand = [("RANK", "1"), ("WORLD_SIZE", "2")];
    assert_eq!(short(&position(&by_hand).unwrap()), (1, 2, 1, 2, Launcher::Variables));
    let own = [("GRADWIRE_RANK", "1"), ("GRADWIRE_WORLD_SIZE", "2"), ("RANK", "0"), ("WORLD_SIZE", "1")];
    assert_eq!(short(&position(&own).unwrap()), (1, 2, 1, 2, Launcher::Variables));
}

#[test]
fn a_slurm_step_counts_and_a_batch_script_does_not() {
    let step = [
        ("SLURM_PROCID", "3"),
        ("SLURM_NTASKS", "5"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_JOB_ID", "17"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_NODEID", "1"),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x2),1"),
    ];
    assert_eq!(short(&position(&step).unwrap()), (3, 5, 1, 2, Launcher::Slurm));
    let one_node: Vec<_> =
        step.into_iter().filter(|(name, _)| !name.contains("NODE") && *name != "SLURM_LOCALID").collect();
    let one_node: Vec<_> = one_node.into_iter().chain([("SLURM_NNODES", "1")]).collect();
    assert_eq!(short(&position(&one_node).unwrap()), (3, 5, 3, 5, Launcher::Slurm));

    let without = |missing: &str| step.into_iter().filter(|(name, _)| *name != missing).collect::<Vec<_>>();
    let with = |name: &'static str, value: &'static str| {
        let mut pairs = without(name);
        pairs.push((name, value));
        pairs
    };
    for stray in [
        without("SLURM_STEP_ID"),
        without("SLURM_PROCID"),
        with("SLURM_STEP_ID", "batch"),
        with("SLURM_STEP_ID", "4294967291"),
    ] {
        assert_eq!(position(&stray).unwrap().launcher, Launcher::None, "{stray:?}");
    }
    let one_task =
        [("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_NTASKS", "4"), ("SLURM_STEP_ID", "0")];
    assert_eq!(position(&one_task).unwrap().launcher, Launcher::None);
}

#[test]
fn contradictions_name_the_variable_and_its_value() {
    type Case = (&'static [(&'static str, &'static str)], &'static [&'static str]);
    let cases: [Case; 9] = [
        (&[("RANK", "4"), ("WORLD_SIZE", "4")], &["RANK is 4", "WORLD_SIZE is 4"]),
        (&[("RANK", "-1"), ("WORLD_SIZE", "4")], &["RANK is '-1'"]),
        (&[("RANK", "0"), ("WORLD_SIZE", "many")], &["WORLD_SIZE is 'many'"]),
        (&[("RANK", "0")], &["RANK is 0", "WORLD_SIZE is not set"]),
        (&[("WORLD_SIZE", "2")], &["WORLD_SIZE is 2", "RANK is not set"]),
        (&[("RANK", "0"), ("WORLD_SIZE", "0")], &["WORLD_SIZE is 0"]),
        (&[("RANK", "0"), ("WORLD_SIZE", "1000000")], &["WORLD_SIZE is 1000000"]),
        (&[("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "2"), ("LOCAL_WORLD_SIZE", "2")], &["LOCAL_RANK is 2"]),
        (&[("OMPI_COMM_WORLD_RANK", "2"), ("OMPI_COMM_WORLD_SIZE", "2")], &["OMPI_COMM_WORLD_RANK is 2"]),
    ];
    for (pairs, words) in cases {
        let fault = position(pairs).unwrap_err();
        assert!(matches!(fault.kind, FaultKind::InvalidArgument | FaultKind::WorldMismatch), "{fault}");
        for word in words {
            assert!(fault.detail.contains(word), "{fault}");
        }
    }
}

#[test]
fn bad_settings_are_named_and_a_secret_is_never_repeated() {
    let base = [("RANK", "0"), ("WORLD_SIZE", "2")];
    let typo = &SECRET[1..];
    for (name, value) in [
        ("GRADWIRE_SECRET", typo),
        ("GRADWIRE_SECRET_FILE", "/nonexistent"),
        ("GRADWIRE_INSTANCE", "xyz"),
        ("GRADWIRE_BROKER", "localhost:6650"),
        ("GRADWIRE_BROKER", "pulsar://"),
        ("GRADWIRE_JOB", "a/b"),
        ("GRADWIRE_ADDRESS", "eth0"),
        ("GRADWIRE_PORT", "0"),
        ("GRADWIRE_ADVERTISE", "host:7000"),
        ("GRADWIRE_ADVERTISE", "0.0.0.0"),
    ] {
        let pairs: Vec<_> = base.into_iter().chain([(name, value)]).collect();
        let fault = place(&pairs).unwrap_err();
        assert_eq!(fault.kind, FaultKind::InvalidArgument, "{fault}");
        assert!(fault.detail.contains(name) || name == "GRADWIRE_JOB", "{fault}");
        assert!(!fault.detail.contains(typo), "{fault}");
    }
}

#[test]
fn ranks_of_one_host_have_ports_one_after_the_other() {
    let rank = |port: &str, advertise: &str| {
        let given = [
            ("RANK", "5"),
            ("WORLD_SIZE", "8"),
            ("LOCAL_RANK", "2"),
            ("LOCAL_WORLD_SIZE", "4"),
            ("GRADWIRE_SECRET", SECRET),
            ("GRADWIRE_BROKER", "pulsar://h:1"),
            ("GRADWIRE_PORT", port),
            ("GRADWIRE_ADVERTISE", advertise),
        ];
        let given: Vec<_> = given.into_iter().filter(|(_, value)| !value.is_empty()).collect();
        place(&given).map(|place| (place.port, place.advertise.map(|address| address.to_string())))
    };
    assert_eq!(rank("", "").unwrap(), (0, None));
    assert_eq!(rank("7000", "").unwrap(), (7002, None));
    assert_eq!(rank("7000", "203.0.113.5").unwrap(), (7002, Some("203.0.113.5:0".to_owned())));
    assert_eq!(rank("7000", "203.0.113.5:9000").unwrap(), (7002, Some("203.0.113.5:9002".to_owned())));
    assert_eq!(rank("", "[2001:db8::1]:9000").unwrap().1, Some("[2001:db8::1]:9002".to_owned()));
    assert_eq!(rank("65534", "").unwrap_err().kind, FaultKind::InvalidArgument);
}

#[test]
fn a_secret_may_come_from_a_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("secret");
    fs::write(&path, format!("{SECRET}\n")).unwrap();
    let file = ("GRADWIRE_SECRET_FILE", path.to_str().unwrap());
    assert_eq!(place(&[file]).unwrap().secret.to_hex(), SECRET);
    let other = "ff".repeat(32);
    assert_eq!(place(&[file, ("GRADWIRE_SECRET", &other)]).unwrap().secret.to_hex(), other);
}

#[test]
fn several_hosts_need_a_secret_and_a_broker() {
    let base = [
        ("OMPI_COMM_WORLD_RANK", "3"),
        ("OMPI_COMM_WORLD_SIZE", "4"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ];
    let with = |more: &[(&'static str, &'static str)]| {
        let pairs: Vec<_> = base.into_iter().chain(more.iter().copied()).collect();
        place(&pairs)
    };
    let fault = with(&[]).unwrap_err();
    assert_eq!(fault.kind, FaultKind::SecretMissing);
    assert!(fault.detail.contains("mpirun -x GRADWIRE_SECRET -x GRADWIRE_BROKER"), "{fault}");
    assert_eq!(with(&[("GRADWIRE_SECRET", SECRET)]).unwrap_err().kind, FaultKind::BrokerUnreachable);
    assert_eq!(with(&[("GRADWIRE_BROKER", "pulsar://h:1")]).unwrap_err().kind, FaultKind::SecretMissing);
    let place = with(&[("GRADWIRE_SECRET", SECRET), ("GRADWIRE_BROKER", "pulsar://h:1")]).unwrap();
    assert_eq!((place.rank, place.local_rank), (Rank(3), 1));
}

#[test]
fn instances_agree_between_ranks_and_differ_between_runs() {
    let instance = |rank: &str, namespace: &str, secret: &str| {
        place(&[
            ("OMPI_COMM_WORLD_RANK", rank),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("PMIX_NAMESPACE", namespace),
            ("GRADWIRE_SECRET", secret),
            ("GRADWIRE_BROKER", "pulsar://h:1"),
        ])
        .unwrap()
        .instance
    };
    assert_eq!(instance("0", "1", SECRET), instance("1", "1", SECRET));
    assert_ne!(instance("0", "1", SECRET), instance("0", "2", SECRET));
    assert_ne!(instance("0", "1", SECRET), instance("0", "1", &"ff".repeat(32)));
}

#[test]
fn rank_0_hands_over_to_the_others_of_its_host() {
    let directory = tempfile::tempdir().unwrap();
    let temporary = directory.path().to_str().unwrap().to_owned();
    let rank = |rank: &str, world_size: &str| {
        place(&[
            ("OMPI_COMM_WORLD_RANK", rank),
            ("OMPI_COMM_WORLD_SIZE", world_size),
            ("OMPI_COMM_WORLD_LOCAL_RANK", rank),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", world_size),
            ("PMIX_NAMESPACE", "17"),
            ("TMPDIR", &temporary),
        ])
    };
    assert_eq!(rank("1", "2").unwrap_err().kind, FaultKind::DeadlineExceeded);
    let mut first = rank("0", "2").unwrap();
    let second = rank("1", "2").unwrap();
    assert_eq!((&first.job, first.instance, &first.broker), (&second.job, second.instance, &second.broker));
    assert!(first.secret == second.secret);
    assert!(first.guard.serves_broker() && !second.guard.serves_broker());
    assert_eq!(rank("1", "3").unwrap_err().kind, FaultKind::WorldMismatch);
    first.guard.all_joined();
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    assert!(std::net::TcpStream::connect(first.broker.as_ref().unwrap().url.trim_start_matches("pulsar://")).is_ok());
}

proptest! {
    #[test]
    fn any_variables_are_a_place_within_the_world_or_a_fault(
        values in prop::collection::vec((0_usize..12, "[0-9]{0,3}|[a-z(x),-]{1,6}"), 0..12)
    ) {
        const NAMES: [&str; 12] = [
            "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID",
            "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE",
        ];
        let map: HashMap<&str, String> = values.into_iter().map(|(name, value)| (NAMES[name], value)).collect();
        if let Ok(position) = Position::find(&|name| map.get(name).cloned()) {
            prop_assert!(position.rank.0 < position.world_size);
            prop_assert!(position.local_rank < position.local_world_size);
            prop_assert!(position.local_world_size <= position.world_size);
        }
    }
}

#[test]
fn a_federated_job_needs_a_name_a_secret_and_a_broker() {
    let secret = "ab".repeat(32);
    let all = [("GRADWIRE_JOB", "hospital"), ("GRADWIRE_SECRET", secret.as_str()), ("GRADWIRE_BROKER", "pulsar://b:1")];
    let read = |left_out: usize| {
        let variables = move |name: &str| {
            let found = all.iter().enumerate().find(|(index, (known, _))| *index != left_out && *known == name)?;
            Some(found.1.1.to_owned())
        };
        super::job(&variables)
    };
    let job = read(usize::MAX).unwrap();
    assert_eq!(job.instance, gradwire_control::federated::federated_instance(&job.job, None));
    let kinds = [FaultKind::InvalidArgument, FaultKind::SecretMissing, FaultKind::BrokerUnreachable];
    for (left_out, kind) in kinds.into_iter().enumerate() {
        let fault = read(left_out).unwrap_err();
        assert_eq!(fault.kind, kind);
        assert!(fault.detail.contains(all[left_out].0), "{fault}");
    }
}
