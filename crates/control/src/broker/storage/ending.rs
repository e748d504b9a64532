//! How the journal ends: as it was written, as a crash leaves it, or damaged.
//!
//! What the end of the process leaves is a front of what was written: the last frame may be cut off. A loss of power
//! may also leave zeros up to the end of a page where something was written, or another content of the last frame. Where
//! frames were not synced, whole pages may be missing, with later ones there. Everything else is damage: nothing of it
//! may be loaded, and nothing changed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::journal::{FRAME_HEADER_BYTES, Frames};
use super::table::TableError;

/// What systems write at once.
const PAGE_BYTES: usize = 4096;
/// So many zeros at the end of a page, which a frame goes beyond, say that the page was not written.
const ZEROS: usize = 8;

const CHANGED: &str = "a change is not as it was written, and others follow it";

/// A journal file, from the table's state on.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) path: PathBuf,
    pub(super) first: u64,
    /// Frames with this number and higher ones are in later files, or do not count.
    pub(super) end: u64,
    /// Where whole frames end, if something is behind them that has to be cut off.
    pub(super) cut: Option<usize>,
}

/// What is behind the last whole frame of a file.
#[derive(Debug, PartialEq, Eq)]
enum Ending {
    Whole,
    /// A frame that was not written whole, and nothing after it.
    Torn,
    /// The same, and frames after it.
    Hole,
    Damaged(&'static str),
}

/// Finds out which frames of the files count, without changing anything. `applied` is the last one in the table.
///
/// # Errors
/// When something is damaged: names the file, the place and what is wrong.
pub(super) fn examine(files: &BTreeMap<u64, PathBuf>, applied: u64) -> Result<Vec<Part>, TableError> {
    let mut parts: Vec<Part> = Vec::new();
    let mut reached = applied;
    let mut lost_power = false;
    let mut rest = files.iter().peekable();
    while let Some((&first, path)) = rest.next() {
        let end = rest.peek().map_or(u64::MAX, |(next, _)| **next);
        let mut part = Part { path: path.clone(), first, end, cut: None };
        if end <= applied.saturating_add(1) {
            // All of it is in the table.
            continue;
        }
        if lost_power {
            (part.end, part.cut) = (first, Some(0));
            parts.push(part);
            continue;
        }
        if first > reached + 1 {
            let detail = format!("its topics are those of change {reached}, not of {}", first - 1);
            return Err(TableError::Damaged(detail));
        }
        let mut frames = Frames::read(path, first, end)?;
        while frames.next().is_some() {}
        reached = reached.max(frames.number - 1);
        if frames.number < end {
            let last = end == u64::MAX;
            let ending = ending(&frames);
            let what = match ending {
                Ending::Whole | Ending::Torn if last => "",
                Ending::Damaged(what) => what,
                _ if frames.header.may_have_holes() => "",
                Ending::Whole | Ending::Torn => "changes are missing at its end",
                Ending::Hole => CHANGED,
            };
            if !what.is_empty() {
                return Err(TableError::Damaged(describe(path, frames.position, what)));
            }
            lost_power = !last;
            if ending != Ending::Whole {
                part.cut = Some(frames.position);
                part.end = frames.number;
            }
        }
        parts.push(part);
    }
    Ok(parts)
}

fn describe(path: &Path, position: usize, what: &str) -> String {
    format!("the journal file {}, at byte {position}: {what}", path.display())
}

fn ending(frames: &Frames) -> Ending {
    let (position, rest) = (frames.position, frames.rest());
    if rest.is_empty() {
        return Ending::Whole;
    }
    let header = frames.header_at(position);
    if header.as_ref().is_some_and(|header| header.number != frames.number) {
        return Ending::Damaged("its changes are not in the order in which they were written");
    }
    let bytes = header.as_ref().map_or(FRAME_HEADER_BYTES, |header| header.bytes.saturating_add(FRAME_HEADER_BYTES));
    let is_unwritten = has_unwritten_page(rest, position, bytes);
    if has_later_frame(frames) {
        return if is_unwritten { Ending::Hole } else { Ending::Damaged(CHANGED) };
    }
    let is_last = header.is_some() && rest.iter().skip(bytes).all(|byte| *byte == 0);
    if is_last || rest.len() < FRAME_HEADER_BYTES || is_unwritten {
        Ending::Torn
    } else {
        Ending::Damaged("what follows was never written by gradwire")
    }
}

/// Whether a frame of `bytes`, with which `rest` starts, holds the end of a page that was not written, or ends in one.
fn has_unwritten_page(rest: &[u8], position: usize, bytes: usize) -> bool {
    let mut end = PAGE_BYTES - position % PAGE_BYTES;
    let mut start = 0;
    while start < bytes.min(rest.len()) {
        let page = &rest[start..end.min(rest.len())];
        let zeros = page.iter().rev().take_while(|byte| **byte == 0).count();
        // As many as there are, where the frame starts or ends near the page's end.
        if zeros >= ZEROS.min(page.len()) && start + page.len() - zeros < bytes {
            return true;
        }
        (start, end) = (end, end + PAGE_BYTES);
    }
    false
}

/// Whether anywhere behind the next frame's start there is the header of one that comes after it.
fn has_later_frame(frames: &Frames) -> bool {
    let most = frames.number + (frames.rest().len() / FRAME_HEADER_BYTES) as u64;
    let positions = frames.position + 1..frames.bytes.len().saturating_sub(FRAME_HEADER_BYTES - 1);
    positions.into_iter().any(|position| {
        let number =
            frames.bytes[position + 4..position + 12].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        (frames.number..=most).contains(&number) && frames.header_at(position).is_some()
    })
}

#[cfg(test)]
mod tests;
