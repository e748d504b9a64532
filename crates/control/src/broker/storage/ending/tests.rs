//! What a crash leaves is told apart from damage.

use std::fs;

use proptest::prelude::*;
use tempfile::TempDir;

use super::super::header::{FILE_HEADER_BYTES, FileHeader};
use super::super::tests::{add, assert_holds, checkpoint, crashed, files, open, torn_files};
use super::super::{Storage, journal};
use super::*;

const GROUPS: u64 = 20;

/// A directory with groups in its journal, as a crash leaves it, and where they end.
fn written() -> (TempDir, PathBuf, Vec<usize>) {
    written_with(false)
}

fn written_with(synced: bool) -> (TempDir, PathBuf, Vec<usize>) {
    let directory = tempfile::tempdir().unwrap();
    let (mut storage, _) = Storage::open(directory.path(), synced).unwrap();
    let mut ends = vec![storage.journal.bytes() as usize];
    for number in 0..GROUPS {
        storage.append(&add(number)).unwrap();
        ends.push(storage.journal.bytes() as usize);
    }
    let path = journal::files(directory.path()).unwrap().into_values().next().unwrap();
    (directory, path, ends)
}

fn edit(path: &Path, edit: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    edit(&mut bytes);
    fs::write(path, bytes).unwrap();
}

/// As if the system had been started again since.
fn restart_system(path: &Path) {
    edit(path, |bytes| {
        let header = FileHeader::decode(bytes).unwrap();
        let header = FileHeader { boot: !header.boot, ..header };
        bytes[..FILE_HEADER_BYTES].copy_from_slice(&header.encode());
    });
}

fn journals(directory: &TempDir) -> Vec<(String, Vec<u8>)> {
    files(directory).into_iter().filter(|(name, _)| name.starts_with("journal-")).collect()
}

/// The directory is refused again and again, and nothing of its journal changes.
fn assert_refused(directory: &TempDir, parts: &[&str]) {
    let before = journals(directory);
    for _ in 0..2 {
        let fault = Storage::open(directory.path(), false).expect_err("damage");
        for part in parts.iter().chain(&["is damaged", "move it away", directory.path().to_str().unwrap()]) {
            assert!(fault.detail.contains(part), "'{part}' in {fault}");
        }
        assert!(journals(directory) == before, "the journal changed");
    }
}

#[test]
fn a_size_that_cannot_be_is_damage_wherever_it_is() {
    for frame in [0, 7, GROUPS as usize - 1] {
        let (directory, path, ends) = written();
        edit(&path, |bytes| bytes[ends[frame]..ends[frame] + 4].fill(0xff));
        assert_refused(&directory, &[path.to_str().unwrap(), &format!("at byte {}", ends[frame])]);
    }
}

#[test]
fn garbage_behind_the_journal_is_damage() {
    for bytes in [100, 5000, 16 << 20] {
        let (directory, path, ends) = written();
        edit(&path, |file| file.extend((1..=bytes).map(|number: u32| number.wrapping_mul(2_654_435_761) as u8 | 1)));
        assert_refused(&directory, &[&format!("at byte {}", ends[GROUPS as usize])]);
    }
}

#[test]
fn a_journal_that_is_empty_or_cut_off_in_its_header_is_damage() {
    for bytes in [0, 1, FILE_HEADER_BYTES - 1] {
        let (directory, path, _) = written();
        edit(&path, |file| file.truncate(bytes));
        assert_refused(&directory, &[path.to_str().unwrap(), &format!("of {bytes} bytes")]);
    }
}

#[test]
fn a_journal_that_is_absent_is_damage_before_the_first_checkpoint_too() {
    let (directory, path, _) = written();
    fs::remove_file(path).unwrap();
    assert_refused(&directory, &["journal is missing"]);
}

#[test]
fn a_change_in_a_file_that_others_follow_is_damage() {
    let directory = tempfile::tempdir().unwrap();
    let (mut storage, _) = open(&directory);
    for number in 0..4 {
        storage.append(&add(number)).unwrap();
        if number % 2 == 1 {
            storage.checkpoint().unwrap();
        }
    }
    drop(storage);
    let first = journal::files(directory.path()).unwrap().into_values().next().unwrap();
    // Its last change, which would be taken for torn in the last file, and a cut between two changes.
    for cut in [1, fs::read(&first).unwrap().len() / 2 - FILE_HEADER_BYTES / 2] {
        let copy = crashed(&directory);
        let path = copy.path().join(first.file_name().unwrap());
        edit(&path, |bytes| bytes.truncate(bytes.len() - cut));
        assert_refused(&copy, &[path.to_str().unwrap(), "missing"]);
    }
}

#[test]
fn what_is_in_the_table_already_may_be_gone() {
    let directory = tempfile::tempdir().unwrap();
    let (mut storage, _) = open(&directory);
    storage.append(&add(0)).unwrap();
    let before = crashed(&directory);
    checkpoint(&mut storage);
    storage.append(&add(1)).unwrap();
    drop(storage);
    // A file that was not removed any more, and lost its content.
    let (name, _) = journals(&before).swap_remove(0);
    fs::write(directory.path().join(name), b"").unwrap();
    assert_holds(&open(&directory).1, 2);
}

#[test]
fn a_last_change_of_another_content_is_torn_and_kept_beside() {
    let (directory, path, ends) = written();
    edit(&path, |bytes| *bytes.last_mut().unwrap() ^= 1);
    let cut = fs::read(&path).unwrap()[ends[GROUPS as usize - 1]..].to_vec();
    assert_holds(&open(&directory).1, GROUPS - 1);
    let name = format!("{}.torn", path.file_name().unwrap().to_str().unwrap());
    assert_eq!(torn_files(&directory), [(name, cut)]);
    // It stays there.
    assert_holds(&open(&directory).1, GROUPS - 1);
    assert_eq!(torn_files(&directory).len(), 1);
}

#[test]
fn what_is_cut_off_at_the_same_place_again_gets_a_file_of_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("journal-0000000000000001");
    for cut in [20, 30, 30] {
        let (mut storage, _) = open(&directory);
        storage.append(&add(0)).unwrap();
        drop(storage);
        // Their salts differ, so their bytes do.
        edit(&path, |bytes| bytes.truncate(FILE_HEADER_BYTES + cut));
    }
    assert!(open(&directory).1.topics.is_empty());
    let sizes: Vec<usize> = torn_files(&directory).iter().map(|(_, content)| content.len()).collect();
    assert_eq!(sizes, [20, 30, 30]);
}

/// Zeros in place of a page in the middle, with later changes there.
fn lose_page(path: &Path, ends: &[usize]) -> u64 {
    let middle = ends[GROUPS as usize / 2].next_multiple_of(PAGE_BYTES);
    edit(path, |bytes| bytes[middle..middle + PAGE_BYTES].fill(0));
    ends.iter().filter(|end| **end <= middle).count() as u64 - 1
}

#[test]
fn a_loss_of_power_leaves_holes_only_where_nothing_was_synced() {
    for (synced, restarted) in [(false, false), (true, true), (true, false)] {
        let (directory, path, ends) = written_with(synced);
        lose_page(&path, &ends);
        if restarted {
            restart_system(&path);
        }
        assert_refused(&directory, &["others follow it"]);
    }
    let (directory, path, ends) = written();
    let whole = lose_page(&path, &ends);
    restart_system(&path);
    assert_holds(&open(&directory).1, whole);
    assert_eq!(torn_files(&directory).len(), 1);
    // A flipped bit is none.
    let (directory, path, ends) = written();
    edit(&path, |bytes| bytes[ends[3] + 30] ^= 1);
    restart_system(&path);
    assert_refused(&directory, &[&format!("at byte {}", ends[3])]);
}

#[test]
fn a_loss_of_power_may_leave_a_later_file_and_not_all_of_an_earlier_one() {
    let directory = tempfile::tempdir().unwrap();
    let (mut storage, _) = open(&directory);
    for number in 0..4 {
        storage.append(&add(number)).unwrap();
        if number == 1 {
            storage.checkpoint().unwrap();
        }
    }
    drop(storage);
    let first = journal::files(directory.path()).unwrap().into_values().next().unwrap();
    edit(&first, |bytes| bytes.truncate(FILE_HEADER_BYTES));
    assert_refused(&directory, &["missing"]);
    restart_system(&first);
    let (mut storage, loaded) = open(&directory);
    assert!(loaded.topics.is_empty());
    assert_eq!(torn_files(&directory).len(), 1);
    storage.append(&add(0)).unwrap();
    drop(storage);
    assert_holds(&open(&directory).1, 1);
}

#[test]
fn nothing_that_a_client_sends_passes_for_a_change() {
    let (_other, other, _) = written();
    let directory = tempfile::tempdir().unwrap();
    let (mut storage, _) = open(&directory);
    storage.append(&add(0)).unwrap();
    let mut ops = super::super::Ops::default();
    ops.put_entry(3, 1, 0, &fs::read(other).unwrap().into());
    storage.append(&ops).unwrap();
    drop(storage);
    let path = journal::files(directory.path()).unwrap().into_values().next().unwrap();
    edit(&path, |bytes| bytes.truncate(bytes.len() - 1));
    assert_holds(&open(&directory).1, 1);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    /// A changed byte anywhere before the last change's content is found, and nothing is lost in silence.
    #[test]
    fn damage_in_the_journal_is_refused(position in any::<prop::sample::Index>(), flip in 1_u8..) {
        let (directory, path, ends) = written();
        let position = position.index(ends[GROUPS as usize]);
        edit(&path, |bytes| bytes[position] ^= flip);
        if position < ends[GROUPS as usize - 1] + FRAME_HEADER_BYTES {
            assert_refused(&directory, &[path.to_str().unwrap()]);
        } else {
            assert_holds(&open(&directory).1, GROUPS - 1);
        }
    }
}
