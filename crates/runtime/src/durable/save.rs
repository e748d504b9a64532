//! Saving and restoring as a group.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

use gradwire_proto::limits::WORLD_SIZE_MAX;
use gradwire_proto::saved::{Cut, SavedManifest, SavedPart, SavedShard, ShardHeader, check_parts};
use gradwire_proto::wire::{Malformed, Reader};
use gradwire_proto::{Epoch, Fault, FaultKind, Rank, Step};

use super::agree::{Heard, Round};
use super::disk::Disk;
use super::names::{Listing, Name, unreadable};
use super::owner::{Ours, SaveIdentity};
use super::read::{Restored, SavedState};
use super::write::{prune, publish, take_away, write_shard};
use crate::{Group, State, StateTensor};

/// Large enough that checksums and calls cost nothing beside the data, small enough to be read into memory whole.
const PIECE_BYTES: u32 = 4 << 20;
/// Whoever waits for a rank that writes or reads gives it the deadline of an operation, and a second for so many bytes of
/// the state: slower is stuck.
const BYTES_PER_SECOND_MIN: u64 = 4 << 20;

/// A state that was saved.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Saved {
    /// How many steps are final in it.
    pub step: Step,
    /// Its own directory.
    pub path: PathBuf,
    /// Bytes of the state.
    pub bytes: u64,
}

impl Group {
    /// Saves the state in `directory`, which all ranks see: every rank writes a share of it. Collective: every rank calls
    /// it between the same commits, with no operation in flight, and with the same state. Where it is well, the save
    /// survives a crash of every process and a loss of power; [`SavedState::latest`] finds it. Older saves are deleted
    /// then, but for as many as [`Builder::saves_kept`](crate::Builder::saves_kept) says: those of this run, and of the runs
    /// that it went on from by [`Group::restore`]. Where others save in the same directory, it is refused.
    ///
    /// It takes one piece of 4 MiB of memory. Every rank that waits gives the others the deadline of an operation, and a
    /// second for each 4 MiB of the state.
    ///
    /// What was saved is saved: a second save between two commits, by the same path on this rank, writes nothing and
    /// returns the first one, as long as the state is what it was; that is checked. So a program may save now and then, and
    /// once more when it ends.
    ///
    /// # Errors
    /// [`FaultKind::NotSaved`], on every rank, that names the rank which could not do its part and why, or the save of another
    /// job or run that is there. That is no reason to end the training: the save before is whole and in place, the group goes
    /// on, and the next save may succeed. Otherwise as [`Handle::wait`](crate::Handle::wait), but never
    /// [`FaultKind::StepAborted`]: a rank that is lost meanwhile makes it `NotSaved` unless its share was written.
    ///
    /// Where lost ranks do not fail the job nothing is written twice between two commits: `InvalidArgument` for a second
    /// save to another directory, or of a state that was changed since the first one; `NotSaved` again where the first one
    /// could not be made. With [`Recovery::Fail`](crate::Recovery::Fail) these are made.
    pub fn save(&self, directory: &Path, state: &dyn State) -> Result<Saved, Fault> {
        self.save_on(Disk::real(), directory, state)
    }

    pub(super) fn save_anew(
        &self,
        disk: Disk<'_>,
        directory: &Path,
        state: &dyn State,
        step: Step,
    ) -> Result<Saved, Fault> {
        let since = self.epoch();
        let parts = state.parts();
        let bytes = parts.iter().map(|part| part.bytes.len() as u64).sum();
        let patience = self.patience(bytes);
        let me = self.rank();

        // Every rank takes part in every exchange, whatever went wrong before: so nobody waits for one that gave up.
        let ours = &self.durable.ours;
        let proposed = propose(ours, directory, &parts, step, since, &self.members());
        let (said, mut trouble) = match proposed {
            Ok(call) => (Some(call.encode()), None),
            Err(fault) => (None, Some(fault)),
        };
        let called = match self.say(Round::Call, said.as_deref(), patience, since)? {
            Heard::Said(rank, call) => Call::decode(&call).ok().map(|call| (rank, call)),
            Heard::Nothing | Heard::Lost => None,
        };
        if let (Some((caller, call)), None) = (&called, &trouble) {
            let own = Call { parts_crc: parts_crc(&parts), step, ..call.clone() };
            let written = own.check(call, *caller).and_then(|()| match call.header(me) {
                Some(header) => write_shard(disk, &call.unfinished(directory), &header, &parts),
                None => Ok(()),
            });
            trouble = written.err();
        }
        let text = trouble.as_ref().map(|fault| fault.detail.as_bytes());
        let failed = match self.say(Round::Written, text, patience, since)? {
            Heard::Said(rank, text) => Some((rank, String::from_utf8_lossy(&text).into_owned())),
            Heard::Nothing | Heard::Lost => trouble.map(|fault| (me, fault.detail)),
        };
        let publisher = called.as_ref().is_some_and(|(_, call)| call.members.first() == Some(&me));
        let verdict = called.as_ref().filter(|_| publisher).map(|(_, call)| match failed.clone() {
            Some((rank, text)) => Verdict::Failed(rank, text),
            None => {
                let mut manifest = call.manifest(&parts, self.world_size(), &ours.identity);
                match publish(disk, directory, call.name, &mut manifest) {
                    Ok(_) => Verdict::Published,
                    Err(fault) => Verdict::Failed(fault.rank.unwrap_or(me), fault.detail),
                }
            }
        });
        let word = verdict.as_ref().map(Verdict::encode);
        let heard = match self.say(Round::Published, word.as_deref(), patience, since)? {
            Heard::Said(_, word) => Verdict::decode(&word),
            Heard::Nothing | Heard::Lost => verdict,
        };
        // Nobody goes on before all have looked. Where steps are aborted, nobody waits here for ranks that are not coming:
        // an exchange knows that, and a barrier would not.
        self.say(Round::Through, None, patience, since)?;

        let Some((_, call)) = called else {
            let (rank, text) = failed.unwrap_or((me, "a rank was lost when it began".to_owned()));
            return Err(self.not_saved(rank, &text));
        };
        let verdict = heard.unwrap_or_else(|| {
            // Whoever should have said it is gone. Either its renaming of the directory came first, or this one does.
            if !take_away(disk, &call.unfinished(directory)) && call.name.path(directory).is_dir() {
                return Verdict::Published;
            }
            let (rank, text) = failed.unwrap_or_else(|| {
                // Where steps are aborted, whoever was lost kept the one that completes the save from saying so.
                let members = self.members();
                match call.members.iter().find(|rank| !members.contains(rank)) {
                    Some(gone) => (*gone, "it was lost before the save was complete".to_owned()),
                    None => (me, "a rank was lost before the save was complete".to_owned()),
                }
            });
            Verdict::Failed(rank, text)
        });
        let path = call.name.path(directory);
        match verdict {
            Verdict::Published => {
                ours.saved(&call.id, call.name);
                if publisher && let Err(error) = prune(disk, directory, call.name, ours) {
                    tracing::warn!(directory = %directory.display(), %error, "older saves could not be removed");
                }
                tracing::info!(save = %path.display(), %step, bytes, "saved");
                Ok(Saved { step, path, bytes })
            }
            Verdict::Failed(rank, text) => {
                take_away(disk, &call.unfinished(directory));
                Err(self.not_saved(rank, &text))
            }
        }
    }

    fn not_saved(&self, rank: Rank, text: &str) -> Fault {
        let who = if rank == self.rank() { String::new() } else { format!("{rank} could not do its part: ") };
        let detail =
            format!("the state was not saved: {who}{text}; the group goes on, and the save before is in place");
        Fault::new(FaultKind::NotSaved, detail).at(rank)
    }

    fn patience(&self, bytes: u64) -> Duration {
        self.identity.deadline.saturating_add(Duration::from_secs(bytes / BYTES_PER_SECOND_MIN))
    }

    /// Replaces the whole state by what was saved. Collective: every rank calls it once, before its first step, with the
    /// save that it opened; that all opened the same one is checked. Every rank reads all of it. The group may have more
    /// ranks than the one that saved it, or fewer.
    ///
    /// # Errors
    /// [`FaultKind::NotRestored`], on every rank, that names the rank and the reason: it opened another save than the lowest
    /// rank; the save is of another job or another version of the model (to begin from it all the same, use
    /// [`SavedState::restore_into`] on every rank); the group does not begin with its step; the state has other parts; or a
    /// file is damaged. The state has to be made anew then. Otherwise as [`Handle::wait`](crate::Handle::wait).
    pub fn restore(&self, saved: &SavedState, state: &mut dyn State) -> Result<Restored, Fault> {
        let since = self.epoch();
        let patience = self.patience(saved.parts().map(|(_, bytes)| bytes).sum());
        let own = saved.mark();
        let mut restored = self.check_saved(saved);
        if let Heard::Said(rank, mark) = self.say(Round::Opened, Some(&own), patience, since)?
            && mark != own
        {
            let detail = format!(
                "it opened {} ({}), but {rank} another save: all ranks must see the same directory, and choose alike",
                saved.path().display(),
                saved.step()
            );
            restored = Err(Fault::new(FaultKind::NotRestored, detail));
        }
        let restored = restored.and_then(|()| saved.restore_into(state));
        if restored.is_ok() {
            self.durable.ours.goes_on_from(saved.manifest(), saved.path().parent());
        }
        let text = restored.as_ref().err().map(|fault| fault.detail.as_bytes());
        match self.say(Round::Filled, text, patience, since)? {
            Heard::Said(rank, text) => {
                let who =
                    if rank == self.rank() { String::new() } else { format!("{rank} could not restore the state: ") };
                let detail = format!("{who}{}", String::from_utf8_lossy(&text));
                Err(Fault::new(FaultKind::NotRestored, detail).at(rank))
            }
            Heard::Lost => Err(Fault::new(FaultKind::NotRestored, "a rank was lost while the state was restored")),
            Heard::Nothing => restored,
        }
    }

    /// Whether the save is of this job's model, and the group begins where it ends.
    fn check_saved(&self, saved: &SavedState) -> Result<(), Fault> {
        let refuse = |what: String| {
            let detail = format!("{} {what}", saved.path().display());
            Err(Fault::new(FaultKind::NotRestored, detail))
        };
        let identity = &self.durable.ours.identity;
        let advice = "to begin from it all the same, use SavedState::restore_into on every rank, and save elsewhere";
        match saved.job() {
            Some(job) if !identity.job.is_empty() && job != identity.job => {
                return refuse(format!("was made by job '{job}', but this is job '{}': {advice}", identity.job));
            }
            _ => {}
        }
        let version = saved.model_version().unwrap_or_default();
        if version != identity.model_version {
            let name = |version: &str| match version {
                "" => "no version of the model".to_owned(),
                version => format!("version '{version}' of the model"),
            };
            let (there, here) = (name(version), name(&identity.model_version));
            return refuse(format!("is of {there}, but this job of {here} (GRADWIRE_MODEL_VERSION): {advice}"));
        }
        let commits = Step(self.commits.load(Ordering::Relaxed));
        if saved.step() != commits {
            return refuse(format!(
                "goes on with {}, but the group is at {commits}: connect with Builder::first_step(saved.step())",
                saved.step()
            ));
        }
        Ok(())
    }
}

/// What the publisher says at the end.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Published,
    Failed(Rank, String),
}

impl Verdict {
    fn encode(&self) -> Vec<u8> {
        match self {
            Self::Published => Vec::new(),
            Self::Failed(rank, text) => [&rank.0.to_le_bytes()[..], text.as_bytes()].concat(),
        }
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        match bytes.split_first_chunk() {
            None => Some(Self::Published),
            Some((rank, text)) => {
                Some(Self::Failed(Rank(u32::from_le_bytes(*rank)), String::from_utf8_lossy(text).into_owned()))
            }
        }
    }
}

/// The call to save: what the lowest rank says, and every rank does. The shares are a function of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Call {
    pub(super) id: [u8; 16],
    pub(super) name: Name,
    pub(super) step: Step,
    pub(super) epoch: Epoch,
    pub(super) parts_crc: u32,
    pub(super) bytes: u64,
    pub(super) piece_bytes: u32,
    pub(super) members: Vec<Rank>,
}

/// The call that this rank would make.
pub(super) fn propose(
    ours: &Ours,
    directory: &Path,
    parts: &[StateTensor<'_>],
    step: Step,
    epoch: Epoch,
    members: &[Rank],
) -> Result<Call, Fault> {
    check_parts(parts.iter().map(|part| (part.name, part.bytes.len() as u64)))?;
    let listing = Listing::read(directory).map_err(|error| unreadable(FaultKind::NotSaved, directory, &error))?;
    ours.check(directory, &listing)?;
    let latest = listing.saves.last().map_or(0, |name| name.sequence);
    let mut random = [0; 4];
    getrandom::fill(&mut random)
        .map_err(|error| Fault::new(FaultKind::NotSaved, format!("the system gives no random bytes: {error}")))?;
    Ok(Call {
        id: ours.id(random),
        name: Name { sequence: latest.saturating_add(1), step },
        step,
        epoch,
        parts_crc: parts_crc(parts),
        bytes: parts.iter().map(|part| part.bytes.len() as u64).sum(),
        piece_bytes: PIECE_BYTES,
        members: members.to_vec(),
    })
}

/// Of names and lengths.
fn parts_crc(parts: &[StateTensor<'_>]) -> u32 {
    let mut bytes = Vec::new();
    for part in parts {
        bytes.extend_from_slice(&(part.name.len() as u64).to_le_bytes());
        bytes.extend_from_slice(part.name.as_bytes());
        bytes.extend_from_slice(&(part.bytes.len() as u64).to_le_bytes());
    }
    gradwire_codec::crc32(&bytes)
}

impl Call {
    fn encode(&self) -> Vec<u8> {
        let mut out = self.id.to_vec();
        for number in [self.name.sequence, self.step.0, self.epoch.0, self.bytes] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out.extend_from_slice(&self.parts_crc.to_le_bytes());
        out.extend_from_slice(&self.piece_bytes.to_le_bytes());
        let mut bitmap = vec![0u8; self.members.last().map_or(0, |last| last.index() / 8 + 1)];
        for member in &self.members {
            bitmap[member.index() / 8] |= 1 << (member.index() % 8);
        }
        out.extend_from_slice(&bitmap);
        out
    }

    fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let id = reader.array()?;
        let (sequence, step, epoch, bytes) = (reader.u64()?, Step(reader.u64()?), Epoch(reader.u64()?), reader.u64()?);
        let (parts_crc, piece_bytes) = (reader.u32()?, reader.u32()?);
        let bitmap = reader.bytes(reader.remaining())?;
        let is_member =
            |rank: &Rank| bitmap.get(rank.index() / 8).is_some_and(|byte| byte >> (rank.index() % 8) & 1 == 1);
        let members = (0..WORLD_SIZE_MAX).map(Rank).filter(is_member).collect();
        Ok(Self { id, name: Name { sequence, step }, step, epoch, parts_crc, bytes, piece_bytes, members })
    }

    /// Whether this rank would do what the caller does.
    fn check(&self, call: &Self, caller: Rank) -> Result<(), Fault> {
        let differs = |what: String| Err(Fault::new(FaultKind::NotSaved, what));
        if self.step != call.step {
            return differs(format!(
                "it is at {}, but {caller} at {}: every rank must save between the same commits",
                self.step, call.step
            ));
        }
        if self.parts_crc != call.parts_crc {
            return differs(format!("its state has other parts, or of other lengths, than that of {caller}"));
        }
        Ok(())
    }

    pub(super) fn unfinished(&self, directory: &Path) -> PathBuf {
        self.name.unfinished(directory, &self.id)
    }

    /// The front of this rank's shard; none if it is no member.
    pub(super) fn header(&self, rank: Rank) -> Option<ShardHeader> {
        let index = self.members.iter().position(|member| *member == rank)? as u32;
        let shards = self.members.len() as u32;
        let share = Cut { state_bytes: self.bytes, piece_bytes: self.piece_bytes, shards }.share(index);
        Some(ShardHeader {
            id: self.id,
            step: self.step,
            rank,
            index,
            shards,
            piece_bytes: self.piece_bytes,
            first: share.start,
            bytes: share.end - share.start,
        })
    }

    /// The manifest, but for what the shards' files say.
    pub(super) fn manifest(
        &self,
        parts: &[StateTensor<'_>],
        world_size: u32,
        identity: &SaveIdentity,
    ) -> SavedManifest {
        let part = |part: &StateTensor<'_>| SavedPart { name: part.name.to_owned(), bytes: part.bytes.len() as u64 };
        SavedManifest {
            sequence: self.name.sequence,
            id: self.id,
            step: self.step,
            epoch: self.epoch,
            world_size,
            job: identity.job.clone(),
            model_version: identity.model_version.clone(),
            piece_bytes: self.piece_bytes,
            parts: parts.iter().map(part).collect(),
            shards: self.members.iter().map(|rank| SavedShard { rank: *rank, file_bytes: 0, seal: 0 }).collect(),
        }
    }
}
