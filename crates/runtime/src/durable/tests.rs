//! Saves on real directories: made, damaged, and interrupted after every single operation.

mod crash;
mod groups;

use std::fs;
use std::path::{Path, PathBuf};

use gradwire_proto::{Epoch, Fault, FaultKind, Rank, Step};
use tempfile::TempDir;

use super::disk::Disk;
use super::names::Listing;
use super::owner::Ours;
use super::save::{Call, propose};
use super::write::{prune, publish, write_shard};
use super::*;
use crate::{State, StateTensor, StateTensorMut};

/// Three parts, one of them empty, with bytes that depend on the step.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Parts(Vec<(String, Vec<u8>)>);

impl Parts {
    fn new(step: u64) -> Self {
        let bytes =
            |length: usize| (0..length).map(|at| (at as u64 * 31 + step * 7 + (at as u64 >> 8)) as u8).collect();
        Self(vec![("weights".into(), bytes(30_001)), ("nothing".into(), vec![]), ("seed".into(), bytes(16))])
    }

    fn empty() -> Self {
        let mut parts = Self::new(0);
        parts.0.iter_mut().for_each(|(_, bytes)| bytes.fill(0));
        parts
    }
}

impl State for Parts {
    fn parts(&self) -> Vec<StateTensor<'_>> {
        self.0.iter().map(|(name, bytes)| StateTensor { name, bytes }).collect()
    }

    fn parts_mut(&mut self) -> Vec<StateTensorMut<'_>> {
        self.0.iter_mut().map(|(name, bytes)| StateTensorMut { name, bytes }).collect()
    }
}

fn call(directory: &Path, state: &Parts, step: u64, ranks: u32) -> Call {
    call_of(&Ours::new(identity()), directory, state, step, ranks).expect("a call")
}

fn call_of(ours: &Ours, directory: &Path, state: &Parts, step: u64, ranks: u32) -> Result<Call, Fault> {
    let members: Vec<Rank> = (0..ranks).map(Rank).collect();
    let call = propose(ours, directory, &state.parts(), Step(step), Epoch(1), &members)?;
    Ok(Call { piece_bytes: 4096, ..call })
}

fn identity() -> SaveIdentity {
    SaveIdentity { job: "digits".into(), model_version: String::new(), keep: 2, run: [7; 8] }
}

/// What a group of so many ranks does, one rank after the other.
fn save(disk: Disk<'_>, directory: &Path, step: u64, ranks: u32) -> Result<(), Fault> {
    save_as(&Ours::new(identity()), disk, directory, step, ranks)
}

fn save_as(ours: &Ours, disk: Disk<'_>, directory: &Path, step: u64, ranks: u32) -> Result<(), Fault> {
    let state = Parts::new(step);
    let call = call_of(ours, directory, &state, step, ranks)?;
    for rank in (0..ranks).map(Rank) {
        let header = call.header(rank).expect("a member");
        write_shard(disk, &call.unfinished(directory), &header, &state.parts())?;
    }
    let mut manifest = call.manifest(&state.parts(), ranks, &ours.identity);
    publish(disk, directory, call.name, &mut manifest)?;
    ours.saved(&call.id, call.name);
    let _ = prune(disk, directory, call.name, ours);
    Ok(())
}

fn saved(steps: &[u64]) -> TempDir {
    let directory = TempDir::new().expect("a directory");
    for step in steps {
        save(Disk::real(), directory.path(), *step, 3).expect("saved");
    }
    directory
}

fn latest(directory: &Path) -> SavedState {
    SavedState::latest(directory).expect("it is whole").expect("there is one")
}

/// Asserts that the latest save is whole, and returns its step.
fn assert_whole(directory: &Path) -> u64 {
    let saved = latest(directory);
    let mut state = Parts::empty();
    let restored = saved.restore_into(&mut state).expect("it is whole");
    assert!(state == Parts::new(restored.step.0), "not what was saved after {}", restored.step);
    assert!(restored.skipped.is_empty());
    restored.step.0
}

#[test]
fn the_latest_save_is_found_and_older_ones_are_removed() {
    let directory = saved(&[]);
    assert!(SavedState::latest(directory.path()).expect("readable").is_none());
    assert!(SavedState::latest(&directory.path().join("nowhere")).expect("nothing yet").is_none());
    fs::write(directory.path().join("notes.txt"), "not gradwire's").expect("written");
    // Back to an earlier step: what was made last counts.
    for step in [100, 200, 300, 150] {
        save(Disk::real(), directory.path(), step, 3).expect("saved");
        assert_eq!(assert_whole(directory.path()), step);
    }
    let names: Vec<String> = entries(directory.path());
    assert_eq!(names, ["notes.txt", "save-000003-step-300", "save-000004-step-150"]);
    assert_eq!(entries(latest(directory.path()).path()), ["manifest", "rank-0", "rank-1", "rank-2"]);
    assert_eq!(latest(directory.path()).job(), Some("digits"));
    assert_eq!(latest(directory.path()).model_version(), None);
}

fn entries(path: &Path) -> Vec<String> {
    let names = fs::read_dir(path).expect("a directory").map(|entry| entry.expect("an entry").file_name());
    let mut names: Vec<String> = names.map(|name| name.into_string().expect("a name")).collect();
    names.sort();
    names
}

#[test]
fn a_run_deletes_what_is_its_own_and_what_it_went_on_from_and_hears_of_others() {
    let directory = saved(&[]);
    let path = directory.path();
    let run = |run: u8, job: &str| Ours::new(SaveIdentity { job: job.into(), run: [run; 8], ..identity() });
    let save = |ours: &Ours, step| save_as(ours, Disk::real(), path, step, 2);
    let refused = |ours: &Ours, words: &str| {
        let fault = save(ours, 99).expect_err(words);
        assert!(fault.kind == FaultKind::NotSaved && fault.detail.contains(words), "{fault}");
    };
    let first = run(1, "");
    (1..=3).for_each(|step| save(&first, step).expect("saved"));
    // One that begins anew leaves alone what is there: with its first save it is the one that saves here.
    let second = run(2, "");
    fs::create_dir(call_of(&first, path, &Parts::new(9), 9, 2).expect("a call").unfinished(path)).expect("made");
    (4..=6).for_each(|step| save(&second, step).expect("saved"));
    assert_eq!(entries(path).len(), 5, "{:?}", entries(path));
    refused(&first, "save-000006-step-6 was made by another run, which saves here at the same time");
    // Whoever goes on from a save goes on with its line; the line of the first is not that.
    let third = run(4, "");
    third.goes_on_from(latest(path).manifest(), Some(path));
    save(&third, 7).expect("saved");
    refused(&second, "save-000007-step-7 was made by another run");
    save(&third, 8).expect("saved");
    let names: Vec<String> = entries(path).into_iter().filter(|name| !name.contains('.')).collect();
    assert_eq!(names, ["save-000002-step-2", "save-000003-step-3", "save-000007-step-7", "save-000008-step-8"]);
    let fourth = run(5, "");
    fourth.goes_on_from(latest(path).manifest(), Some(path));
    save(&third, 9).expect("the other run is not gone");
    refused(&fourth, "save-000009-step-9 was made by another run");
}

#[test]
fn jobs_and_versions_of_a_model_that_differ_do_not_save_in_one_directory() {
    let directory = saved(&[1]);
    let other = |job: &str, version: &str| {
        let ours = SaveIdentity { job: job.into(), model_version: version.into(), keep: 2, run: [9; 8] };
        save_as(&Ours::new(ours), Disk::real(), directory.path(), 5, 2).expect_err("another's").detail
    };
    let said = other("numbers", "");
    assert!(
        said.contains("save-000001-step-1 was made by job 'digits': give each job a directory of its own"),
        "{said}"
    );
    let said = other("digits", "v2");
    assert!(said.contains("was made by a job of another version of the model ('')"), "{said}");
    assert_eq!(entries(directory.path()), ["save-000001-step-1"]);
}

#[test]
fn a_state_of_any_size_is_cut_among_any_number_of_ranks() {
    for ranks in [1, 2, 7, 9, 40] {
        let directory = TempDir::new().expect("a directory");
        save(Disk::real(), directory.path(), 5, ranks).expect("saved");
        assert_eq!(assert_whole(directory.path()), 5);
    }
    let directory = TempDir::new().expect("a directory");
    let nothing = Parts(vec![]);
    let call = call(directory.path(), &nothing, 1, 2);
    for rank in [Rank(0), Rank(1)] {
        let header = call.header(rank).expect("a member");
        write_shard(Disk::real(), &call.unfinished(directory.path()), &header, &[]).expect("written");
    }
    publish(Disk::real(), directory.path(), call.name, &mut call.manifest(&[], 2, &identity())).expect("published");
    latest(directory.path()).restore_into(&mut Parts(vec![])).expect("nothing is missing");
}

#[test]
fn another_state_is_refused_by_the_name_of_its_first_difference_and_stays_as_it_is() {
    let directory = saved(&[1]);
    let refused = |change: fn(&mut Parts), said: &str| {
        let mut state = Parts::new(9);
        change(&mut state);
        let before = state.clone();
        let fault = latest(directory.path()).restore_into(&mut state).expect_err(said);
        assert!(fault.kind == FaultKind::NotRestored && fault.detail.contains(said), "{fault}");
        assert_eq!(state, before);
    };
    refused(|state| state.0[0].1.truncate(30_000), "part 'weights' has 30001 bytes, but 30000 in the state");
    refused(|state| drop(state.0.pop()), "a part 'seed' of 16 bytes, which the state has not");
    refused(|state| state.0.push(("more".into(), vec![1])), "no part 'more', which the state has with 1 bytes");
    refused(|state| state.0[1].0 = "seed".into(), "two parts of the state are called 'seed'");
    let mut state = Parts::empty();
    state.0.reverse();
    latest(directory.path()).restore_into(&mut state).expect("parts are found by name");
    state.0.reverse();
    assert_eq!(state, Parts::new(1));
}

/// Every way in which a file of the latest save is not what was written: what it is then; nothing if it is gone.
fn damages(bytes: &[u8]) -> Vec<(String, Option<Vec<u8>>)> {
    let mut damages = vec![
        ("one byte more".to_owned(), Some([bytes, &[0]].concat())),
        ("foreign".to_owned(), Some(b"\x89PNG\r\n\x1a\n and more".repeat(3))),
        ("gone".to_owned(), None),
    ];
    let step = if bytes.len() > 1000 { 211 } else { 1 };
    for at in (0..bytes.len()).step_by(step).chain([bytes.len() - 1]) {
        let mut flipped = bytes.to_vec();
        flipped[at] ^= 1 << (at % 8);
        damages.push((format!("bit {} of byte {at}", at % 8), Some(flipped)));
    }
    for length in [0, 3, bytes.len() / 2, bytes.len() - 1] {
        damages.push((format!("cut to {length}"), Some(bytes[..length].to_vec())));
    }
    damages
}

#[test]
fn damage_of_any_file_is_found_and_named_and_no_earlier_save_is_taken_unasked() {
    let directory = saved(&[1, 2]);
    let path = latest(directory.path()).path().to_owned();
    for file in entries(&path) {
        let file = path.join(file);
        let whole = fs::read(&file).expect("a file");
        for (what, damaged) in damages(&whole) {
            match damaged {
                Some(bytes) => fs::write(&file, bytes).expect("written"),
                None => fs::remove_file(&file).expect("removed"),
            }
            let mut state = Parts::empty();
            let opened = SavedState::latest(directory.path());
            let fault =
                opened.and_then(|saved| saved.expect("there is one").restore_into(&mut state)).expect_err(&what);
            assert_eq!(fault.kind, FaultKind::NotRestored, "{what}: {fault}");
            let named = fault.detail.starts_with(&format!("{}: ", file.display()));
            assert!(named && fault.detail.contains("save-000001-step-1: name it"), "{what}: {fault}");
            fs::write(&file, &whole).expect("written");
        }
        assert_eq!(assert_whole(directory.path()), 2);
    }
}

#[test]
fn an_earlier_save_is_taken_where_the_caller_wishes_it_and_that_is_said() {
    let directory = saved(&[1, 2]);
    let path = latest(directory.path()).path().to_owned();
    let shard = path.join("rank-1");
    let mut bytes = fs::read(&shard).expect("a file");
    bytes[5000] ^= 4;
    fs::write(&shard, bytes).expect("written");
    let saved = SavedState::newest_whole(directory.path()).expect("one is whole").expect("there is one");
    let mut state = Parts::empty();
    let restored = saved.restore_into(&mut state).expect("it is whole");
    assert_eq!((restored.step, state), (Step(1), Parts::new(1)));
    let [(skipped, fault)] = &restored.skipped[..] else { panic!("{restored:?}") };
    assert!(*skipped == path && fault.detail.contains("rank-1: bytes 4160 to 8255 are not"), "{fault}");
    // Named, it is taken too; and where nothing is whole, the latest is what is complained about.
    SavedState::open(saved.path()).expect("it is whole").verify().expect("it is whole");
    fs::remove_file(saved.path().join("manifest")).expect("removed");
    let fault = SavedState::newest_whole(directory.path()).expect_err("nothing is whole");
    assert!(fault.detail.contains("rank-1"), "{fault}");
    assert!(SavedState::newest_whole(&directory.path().join("nowhere")).expect("nothing yet").is_none());
}

#[test]
fn shards_of_another_save_are_not_taken() {
    let directory = saved(&[1, 2]);
    let saves: Vec<PathBuf> = Listing::read(directory.path())
        .expect("readable")
        .saves
        .iter()
        .map(|name| name.path(directory.path()))
        .collect();
    fs::copy(saves[0].join("rank-1"), saves[1].join("rank-1")).expect("copied");
    let fault = SavedState::latest(directory.path()).expect_err("it is another save's");
    assert!(fault.detail.contains("rank-1: it is a shard of another save"), "{fault}");
    fs::copy(saves[1].join("rank-2"), saves[1].join("rank-1")).expect("copied");
    let fault = SavedState::latest(directory.path()).expect_err("it is another shard");
    assert!(fault.detail.contains("rank-1: it "), "{fault}");
}
