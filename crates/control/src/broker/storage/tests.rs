//! The data directory by itself.

use std::os::unix::fs::PermissionsExt as _;

use gradwire_proto::FaultKind;
use proptest::prelude::*;
use tempfile::TempDir;

use super::*;

const TOPIC: u64 = 3;

fn head(next: u64, entries: u64) -> Head {
    Head { name: "persistent://public/default/t".to_owned(), ledger: 5, next, entries, epoch: Some(2) }
}

fn tail(number: u64) -> Bytes {
    // Without zeros at its end: a loss of power may leave zeros behind what was written.
    Bytes::from((number | 1 << 56).to_le_bytes().repeat(if number % 50 == 49 { 5000 } else { 100 }))
}

/// A group that adds entry `number` to a topic that has all before it.
pub(super) fn add(number: u64) -> Ops {
    let mut ops = Ops::default();
    ops.put_head(TOPIC, &head(number + 1, number + 1));
    ops.put_entry(TOPIC, number, 1000 + number, &tail(number));
    ops
}

pub(super) fn open(directory: &TempDir) -> (Storage, Loaded) {
    Storage::open(directory.path(), false).unwrap_or_else(|fault| panic!("{fault}"))
}

pub(super) fn checkpoint(storage: &mut Storage) {
    let checkpoint = storage.checkpoint().unwrap().expect("something to write");
    checkpoint.run().unwrap();
    storage.checkpointed(&checkpoint);
}

pub(super) fn assert_holds(loaded: &Loaded, entries: u64) {
    let topic = &loaded.topics[&TOPIC];
    assert_eq!(topic.head, head(entries, entries));
    for (number, entry) in (0..entries).zip(&topic.entries) {
        assert_eq!((entry.number, entry.arrival_ms, &entry.tail), (number, 1000 + number, &tail(number)));
    }
}

/// Files of a directory, without the lock.
pub(super) fn files(directory: &TempDir) -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<_> = fs::read_dir(directory.path())
        .unwrap()
        .map(|entry| {
            let path = entry.unwrap().path();
            (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(path).unwrap())
        })
        .collect();
    files.sort();
    files
}

/// What was cut off a journal.
pub(super) fn torn_files(directory: &TempDir) -> Vec<(String, Vec<u8>)> {
    files(directory).into_iter().filter(|(name, _)| name.contains(".torn")).collect()
}

/// A copy of a directory as a crash at this moment would leave it.
pub(super) fn crashed(directory: &TempDir) -> TempDir {
    let copy = tempfile::tempdir().unwrap();
    for (name, content) in files(directory) {
        fs::write(copy.path().join(name), content).unwrap();
    }
    copy
}

#[test]
fn what_was_appended_is_there_whenever_the_process_ends() {
    let directory = tempfile::tempdir().unwrap();
    let (mut storage, loaded) = open(&directory);
    assert!(loaded.topics.is_empty());
    for number in 0..300 {
        storage.append(&add(number)).unwrap();
        if number % 70 == 69 {
            // Between the steps of a checkpoint, too.
            let checkpoint = storage.checkpoint().unwrap().unwrap();
            assert_holds(&open(&crashed(&directory)).1, number + 1);
            checkpoint.run().unwrap();
            assert_holds(&open(&crashed(&directory)).1, number + 1);
            storage.checkpointed(&checkpoint);
        }
        if number % 10 == 0 {
            assert_holds(&open(&crashed(&directory)).1, number + 1);
        }
    }
    drop(storage);
    assert_holds(&open(&directory).1, 300);
}

#[test]
fn rows_go_and_change() {
    let directory = tempfile::tempdir().unwrap();
    let (mut storage, _) = open(&directory);
    (0..10).for_each(|number| storage.append(&add(number)).unwrap());
    let mut ops = Ops::default();
    ops.remove_entries(TOPIC, 0..4);
    ops.remove_entries(TOPIC, 6..7);
    ops.put_head(TOPIC, &head(10, 5));
    ops.put_subscription(TOPIC, "stays", b"1");
    ops.put_subscription(TOPIC, "goes", b"1");
    ops.put_schema(TOPIC, 0, b"schema");
    ops.put_head(9, &Head { name: "gone".to_owned(), ..head(1, 0) });
    ops.put_ledger(5);
    storage.append(&ops).unwrap();
    checkpoint(&mut storage);
    let mut ops = Ops::default();
    ops.put_subscription(TOPIC, "stays", b"2");
    ops.remove_subscription(TOPIC, "goes");
    ops.remove_topic(9);
    ops.put_ledger(6);
    storage.append(&ops).unwrap();
    drop(storage);
    let (_, loaded) = open(&directory);
    assert_eq!((loaded.ledger, loaded.topics.len()), (6, 1));
    let topic = &loaded.topics[&TOPIC];
    assert_eq!(topic.entries.iter().map(|entry| entry.number).collect::<Vec<_>>(), [4, 5, 7, 8, 9]);
    assert_eq!(topic.subscriptions, [("stays".to_owned(), b"2".to_vec())]);
    assert_eq!(topic.schemas, [b"schema".to_vec()]);
}

#[test]
fn a_group_that_was_taken_back_is_not_there() {
    let directory = tempfile::tempdir().unwrap();
    let (mut storage, _) = open(&directory);
    storage.append(&add(0)).unwrap();
    storage.append(&add(1)).unwrap();
    storage.take_back();
    assert_holds(&open(&crashed(&directory)).1, 1);
    storage.append(&add(1)).unwrap();
    checkpoint(&mut storage);
    storage.append(&add(2)).unwrap();
    assert_holds(&open(&crashed(&directory)).1, 3);
}

#[test]
fn a_failed_append_leaves_nothing_behind() {
    let directory = tempfile::tempdir().unwrap();
    let (mut storage, _) = open(&directory);
    storage.append(&add(0)).unwrap();
    // A file that takes no more: /dev/full answers every write as a full disk does.
    let full = Arc::new(File::options().append(true).open("/dev/full").unwrap());
    let file = std::mem::replace(&mut storage.journal.file, full);
    let error = storage.append(&add(1)).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    storage.journal.file = file;
    storage.append(&add(1)).unwrap();
    assert_holds(&open(&crashed(&directory)).1, 2);
}

#[test]
fn the_first_group_of_a_file_may_be_taken_back() {
    let directory = tempfile::tempdir().unwrap();
    let (mut storage, _) = open(&directory);
    storage.append(&add(0)).unwrap();
    storage.take_back();
    assert!(storage.checkpoint().unwrap().is_none());
    storage.append(&add(0)).unwrap();
    checkpoint(&mut storage);
    storage.append(&add(1)).unwrap();
    assert_holds(&open(&crashed(&directory)).1, 2);
}

#[test]
fn a_directory_that_goes_while_it_is_used_is_noticed() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("data");
    for gone in [&["topics.redb"][..], &["lock"], &["journal-0000000000000001"], &[]] {
        let (mut storage, _) = Storage::open(&path, false).unwrap();
        storage.append(&add(0)).unwrap();
        gone.iter().for_each(|name| fs::remove_file(path.join(name)).unwrap());
        if gone.is_empty() {
            fs::rename(&path, parent.path().join("elsewhere")).unwrap();
        }
        let noticed = storage.checkpoint().and_then(|checkpoint| checkpoint.expect("something to write").run());
        noticed.unwrap_err();
        drop(storage);
        let _ = fs::remove_dir_all(&path);
    }
    let (mut storage, _) = Storage::open(&path, false).unwrap();
    storage.append(&add(0)).unwrap();
    fs::remove_dir_all(&path).unwrap();
    assert_eq!(storage.append(&add(1)).unwrap_err().kind(), io::ErrorKind::NotFound);
    // When nothing is to be written, too.
    storage.checkpoint().unwrap_err();
}

#[test]
fn a_failed_checkpoint_is_made_up_for() {
    let directory = tempfile::tempdir().unwrap();
    let (mut storage, _) = open(&directory);
    storage.append(&add(0)).unwrap();
    let first = storage.checkpoint().unwrap().unwrap();
    storage.append(&add(1)).unwrap();
    // Not run, as if it had failed. The next one does its work too.
    assert_holds(&open(&crashed(&directory)).1, 2);
    let second = storage.checkpoint().unwrap().unwrap();
    assert_eq!((first.files.len(), second.files.len()), (1, 2));
    second.run().unwrap();
    // Running one again changes nothing.
    first.run().unwrap();
    storage.checkpointed(&second);
    assert!(storage.checkpoint().unwrap().is_none());
    drop((first, second, storage));
    assert_holds(&open(&directory).1, 2);
}

#[test]
fn a_directory_has_one_broker() {
    let directory = tempfile::tempdir().unwrap();
    let (storage, _) = open(&directory);
    let fault = Storage::open(directory.path(), false).unwrap_err();
    assert_eq!(fault.kind, FaultKind::InvalidArgument);
    for part in [directory.path().to_str().unwrap(), "in use", &std::process::id().to_string()] {
        assert!(fault.detail.contains(part), "{fault}");
    }
    drop(storage);
    open(&directory);
}

#[test]
fn directories_of_others_and_of_later_versions_are_refused_and_left_alone() {
    let cases: [(&str, &[u8], &str); 5] = [
        ("thesis.tex", b"", "thesis.tex"),
        ("format", b"gradwire broker data, format 3\n", "newer version"),
        ("format", b"gradwire broker data, format 1\n", "format 1, and this version of gradwire knows format 2"),
        ("format", b"", "damaged"),
        ("format", b"\xff\xff", "damaged"),
    ];
    for (name, content, says) in cases {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join(name), content).unwrap();
        let fault = Storage::open(directory.path(), false).unwrap_err();
        assert!(fault.detail.contains(says), "{fault}");
        assert!(fault.detail.contains(directory.path().to_str().unwrap()), "{fault}");
        assert_eq!(files(&directory), [(name.to_owned(), content.to_vec())]);
    }
}

#[test]
fn what_the_system_refuses_is_said() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, "").unwrap();
    for path in [file.clone(), file.join("below")] {
        let fault = Storage::open(&path, false).unwrap_err();
        assert_eq!(fault.kind, FaultKind::System);
        assert!(fault.detail.contains(path.to_str().unwrap()), "{fault}");
    }
    // Only an unprivileged user is kept out.
    if rustix::process::geteuid().is_root() {
        return;
    }
    let closed = directory.path().join("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o500)).unwrap();
    let fault = Storage::open(&closed, false).unwrap_err();
    assert!(fault.detail.contains("read and write"), "{fault}");
}

#[test]
fn the_directory_is_for_its_owner_alone() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("a/b");
    let (mut storage, _) = Storage::open(&path, false).unwrap();
    storage.append(&add(0)).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
}

#[test]
fn a_missing_table_is_damage_while_there_is_a_journal() {
    let directory = tempfile::tempdir().unwrap();
    let (mut storage, _) = open(&directory);
    storage.append(&add(0)).unwrap();
    drop(storage);
    fs::remove_file(directory.path().join("topics.redb")).unwrap();
    let fault = Storage::open(directory.path(), false).unwrap_err();
    assert!(fault.detail.contains("damaged"), "{fault}");
}

#[test]
fn a_gap_in_the_journal_is_damage() {
    let directory = tempfile::tempdir().unwrap();
    let (mut storage, _) = open(&directory);
    for number in 0..3 {
        storage.append(&add(number)).unwrap();
        storage.checkpoint().unwrap();
    }
    drop(storage);
    fs::remove_file(&journal::files(directory.path()).unwrap()[&2]).unwrap();
    let fault = Storage::open(directory.path(), false).unwrap_err();
    assert!(fault.detail.contains("damaged"), "{fault}");
}

#[test]
fn a_table_that_went_back_is_damage_at_every_start() {
    let directory = tempfile::tempdir().unwrap();
    let (mut storage, _) = open(&directory);
    storage.append(&add(0)).unwrap();
    checkpoint(&mut storage);
    let before = fs::read(directory.path().join("topics.redb")).unwrap();
    storage.append(&add(1)).unwrap();
    checkpoint(&mut storage);
    drop(storage);
    fs::write(directory.path().join("topics.redb"), before).unwrap();
    for _ in 0..2 {
        let fault = Storage::open(directory.path(), false).unwrap_err();
        assert!(fault.detail.contains("damaged") && fault.detail.contains("change 1"), "{fault}");
    }
    let journals = journal::files(directory.path()).unwrap();
    journals.values().for_each(|file| fs::remove_file(file).unwrap());
    assert!(Storage::open(directory.path(), false).unwrap_err().detail.contains("journal is missing"));
}

/// A directory that was closed well.
fn closed() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    let (mut storage, _) = open(&directory);
    (0..200).for_each(|number| storage.append(&add(number)).unwrap());
    checkpoint(&mut storage);
    directory
}

#[test]
fn a_table_that_is_cut_off_or_foreign_is_refused() {
    let directory = closed();
    let table = fs::read(directory.path().join("topics.redb")).unwrap();
    for content in [&b""[..], b"no table", &table[..1000], &table[..table.len() / 2], &vec![0; table.len()]] {
        let copy = crashed(&directory);
        fs::write(copy.path().join("topics.redb"), content).unwrap();
        let fault = Storage::open(copy.path(), false).unwrap_err();
        assert!(fault.detail.contains("damaged"), "{} bytes: {fault}", content.len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// A changed byte anywhere in the table is found, or was in none of the rows.
    #[test]
    fn damage_is_found_and_nothing_is_half_loaded(position in any::<prop::sample::Index>(), flip in 1_u8..) {
        thread_local!(static CLOSED: TempDir = closed());
        CLOSED.with(|directory| {
            let copy = crashed(directory);
            let path = copy.path().join("topics.redb");
            let mut table = fs::read(&path).unwrap();
            // Most of the file is free space, and pages lie at its start.
            let position = position.index(table.len().min(512 << 10));
            table[position] ^= flip;
            fs::write(&path, table).unwrap();
            match Storage::open(copy.path(), false) {
                Ok((_, loaded)) => assert_holds(&loaded, 200),
                Err(fault) => prop_assert!(fault.detail.contains(copy.path().to_str().unwrap()), "{fault}"),
            }
            Ok(())
        })?;
    }

    /// A journal that ends anywhere, as after a loss of power, gives the groups that are whole.
    #[test]
    fn a_torn_journal_gives_what_is_whole(cut in any::<prop::sample::Index>(), zeros in 0_usize..3) {
        let directory = tempfile::tempdir().unwrap();
        let (mut storage, _) = open(&directory);
        let mut ends = vec![storage.journal.bytes() as usize];
        for number in 0..20 {
            storage.append(&add(number)).unwrap();
            ends.push(storage.journal.bytes() as usize);
        }
        drop(storage);
        let path = &journal::files(directory.path()).unwrap()[&1];
        let mut bytes = fs::read(path).unwrap();
        // The file has its header before it has its name.
        let end = ends[0] + cut.index(bytes.len() - ends[0]);
        bytes.truncate(end);
        bytes.resize(end + zeros * 4096, 0);
        fs::write(path, bytes).unwrap();
        let whole = ends.iter().filter(|whole| **whole <= end).count() as u64 - 1;
        let torn = end - ends[whole as usize] + zeros * 4096;
        let (_, loaded) = open(&directory);
        let kept: usize = torn_files(&directory).iter().map(|(_, content)| content.len()).sum();
        prop_assert_eq!(kept, torn);
        if whole == 0 {
            prop_assert!(loaded.topics.is_empty());
        } else {
            assert_holds(&loaded, whole);
        }
    }
}
