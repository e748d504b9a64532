//! Getting state from several members at once.

use std::collections::{BTreeMap, VecDeque};
use std::io;

use gradwire_proto::transfer::{Ask, Given, No, Sums, giver, home};
use gradwire_proto::wire::Malformed;
use gradwire_proto::{Fault, FaultKind, Rank};

use super::stream::{Answer, FrameStream, invalid};
use crate::system;

/// Pieces that are asked of one member before the first of them is here.
const WINDOW: usize = 4;

/// A member that gives its state away.
pub(super) struct Source {
    pub(super) rank: Rank,
    /// Its place among those that are asked.
    pub(super) seat: u32,
    pub(super) stream: FrameStream,
}

/// What went wrong with one member.
pub(super) enum Trouble {
    /// The stream ended, or what came over it makes no sense.
    Lost(io::Error),
    /// It said no.
    No(No),
}

impl Trouble {
    pub(super) fn describe(&self, rank: Rank) -> String {
        match self {
            Self::Lost(error) => format!("{rank}: {error}"),
            Self::No(no) => format!("{rank}: {}", no.detail),
        }
    }
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        Self::Lost(error)
    }
}

/// Asks all members something at once, and reads their answers: in their order.
///
/// # Errors
/// `System` when there are no threads to be had.
pub(super) fn ask_all<T: Send>(
    sources: &mut [Source],
    ask: impl Fn(u32) -> Ask + Sync,
    read: impl Fn(&mut FrameStream) -> Result<T, Trouble> + Sync,
) -> Result<Vec<Result<T, Trouble>>, Fault> {
    let (ask, read) = (&ask, &read);
    let panicked = || Err(Trouble::Lost(io::Error::other("the thread that reads panicked")));
    at_once(sources.iter_mut(), panicked, |source| {
        source.stream.ask(ask(source.seat))?;
        read(&mut source.stream)
    })
}

/// Does something for all of these, each in a thread of its own. Those that were started are waited for in any case.
///
/// # Errors
/// `System` when there are no threads to be had.
pub(super) fn at_once<I: Send, T: Send>(
    items: impl Iterator<Item = I>,
    panicked: impl Fn() -> T,
    act: impl Fn(I) -> T + Sync,
) -> Result<Vec<T>, Fault> {
    let act = &act;
    std::thread::scope(|scope| {
        let threads: Vec<_> = items.map(|item| system::scoped("gradwire-fetch", scope, move || act(item))).collect();
        let ended = |thread: std::thread::ScopedJoinHandle<'_, T>| thread.join().unwrap_or_else(|_| panicked());
        // All are waited for, whether or not the others could be started.
        let outcomes: Vec<Result<T, Fault>> = threads.into_iter().map(|thread| thread.map(ended)).collect();
        outcomes.into_iter().collect()
    })
}

/// The body of an answer.
pub(super) fn body(stream: &mut FrameStream, wanted: Given) -> Result<Vec<u8>, Trouble> {
    match stream.read_answer(wanted)? {
        Answer::Body(body) => Ok(body),
        Answer::No(no) => Err(Trouble::No(no)),
    }
}

pub(super) fn decode<T>(bytes: &[u8], decode: fn(&[u8]) -> Result<T, Malformed>) -> Result<T, Trouble> {
    decode(bytes).map_err(|malformed| invalid(malformed.0).into())
}

/// Which of these gives what is at home at this seat: nothing if all that keep it are lost.
pub(super) fn giver_of(sources: &[Source], home: u32, holders: u32) -> Option<usize> {
    let of = |seat: u32| sources.iter().position(|source| source.seat == seat);
    of(giver(home, holders, |seat| of(seat).is_some())?)
}

/// Of each piece: its CRC-32, and who gave it.
pub(super) type Pieces = BTreeMap<u32, (u32, Rank)>;

/// Compares the pieces that are here with what all members keep.
///
/// # Errors
/// `Diverged`, when the states of two members differ.
pub(super) fn compare(pieces: &Pieces, kept: &[(Rank, Sums)], part_of: &dyn Fn(u32) -> String) -> Result<(), Fault> {
    for (rank, sums) in kept {
        for (piece, crc) in &sums.0 {
            let Some((known, by)) = pieces.get(piece).filter(|(known, _)| known != crc) else { continue };
            tracing::debug!(piece, known, crc, "two members keep different bytes");
            let detail = format!(
                "{by} and {rank} have different states in part '{}': they do not train the same model any more; start the job again from what was saved",
                part_of(*piece)
            );
            return Err(Fault::new(FaultKind::Diverged, detail).at(*rank));
        }
    }
    Ok(())
}

/// One piece, and where it goes.
pub(super) type Target<'a> = (u32, &'a mut [u8]);

/// What came of one member's share.
struct Fetched<'a> {
    /// Pieces that are here, and their checksums.
    got: Vec<(u32, u32)>,
    /// What went wrong before the rest was, if anything did.
    trouble: Option<(Trouble, VecDeque<Target<'a>>)>,
}

/// Gets every piece from the member that is its home, from all members at once; from its backup where that is lost, which
/// is no source any more then. Returns the CRC-32 of each, and who gave it; or who failed to give what nobody else keeps.
///
/// # Errors
/// `System` when there are no threads to be had.
pub(super) fn fetch(
    sources: &mut Vec<Source>,
    holders: u32,
    targets: Vec<Target<'_>>,
) -> Result<Result<Pieces, (Rank, Trouble)>, Fault> {
    let (mut pieces, mut last) = (Pieces::new(), None);
    let mut left: VecDeque<Target<'_>> = targets.into();
    while !left.is_empty() {
        let mut shares: Vec<VecDeque<Target<'_>>> = sources.iter().map(|_| VecDeque::new()).collect();
        for target in left.drain(..) {
            let Some(nth) = giver_of(sources, home(target.0, holders), holders) else {
                return Ok(Err(last.unwrap_or_else(|| (Rank(0), io::Error::other("nobody gives a piece").into()))));
            };
            shares[nth].push_back(target);
        }
        let panicked = || Err(Fault::new(FaultKind::System, "the thread that reads panicked"));
        let got = at_once(sources.iter_mut().zip(shares), panicked, |(source, share)| {
            // Where it shares cores with the members, their steps come first.
            system::yield_to_others();
            Ok(fetch_share(&mut source.stream, share))
        })?;
        let mut lost = Vec::new();
        for (source, fetched) in sources.iter().zip(got) {
            let Fetched { got, trouble } = fetched?;
            pieces.extend(got.into_iter().map(|(piece, crc)| (piece, (crc, source.rank))));
            if let Some((met, rest)) = trouble {
                tracing::info!(why = met.describe(source.rank), "a member gives its state no longer");
                left.extend(rest);
                lost.push(source.seat);
                last = Some((source.rank, met));
            }
        }
        sources.retain(|source| !lost.contains(&source.seat));
    }
    Ok(Ok(pieces))
}

/// Gets what one member is to give.
fn fetch_share<'a>(stream: &mut FrameStream, mut wanted: VecDeque<Target<'a>>) -> Fetched<'a> {
    let (mut asked, mut got) = (VecDeque::new(), Vec::with_capacity(wanted.len()));
    let met = loop {
        match fetch_next(stream, &mut wanted, &mut asked) {
            Ok(Some(piece)) => got.push(piece),
            Ok(None) => break None,
            Err(met) => break Some(met),
        }
    };
    asked.append(&mut wanted);
    Fetched { got, trouble: met.map(|met| (met, asked)) }
}

/// Gets the next piece, and asks for further ones beforehand. Nothing if all are here.
fn fetch_next<'a>(
    stream: &mut FrameStream,
    wanted: &mut VecDeque<Target<'a>>,
    asked: &mut VecDeque<Target<'a>>,
) -> Result<Option<(u32, u32)>, Trouble> {
    while asked.len() < WINDOW
        && let Some(target) = wanted.pop_front()
    {
        asked.push_back(target);
        stream.ask(Ask::Piece(asked[asked.len() - 1].0))?;
    }
    let Some((piece, bytes)) = asked.front_mut() else { return Ok(None) };
    let header = loop {
        let header = stream.read_given()?;
        match Given::from_code(header.bucket.0) {
            Some(Given::Piece) => break header,
            Some(Given::Wait) => stream.read_body(&header, &mut [])?,
            Some(Given::No) => return Err(Trouble::No(stream.read_no(&header)?)),
            _ => return Err(invalid("another answer than a piece").into()),
        }
    };
    stream.read_body(&header, bytes)?;
    let got = (*piece, header.payload_crc);
    asked.pop_front();
    Ok(Some(got))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::system::tests::REFUSES;

    #[test]
    fn without_threads_there_is_a_fault_that_says_what_to_raise_and_no_panic() {
        let act = |number: u32| if number == 2 { panic!("a bug") } else { number * 10 };
        let done = || at_once([1, 2, 3].into_iter(), || 0, act).map_err(|fault| (fault.kind, fault.detail));
        assert_eq!(done(), Ok(vec![10, 0, 30]));
        REFUSES.set(true);
        let (kind, detail) = done().expect_err("there are none");
        assert!(kind == FaultKind::System && detail.contains("no thread could be started"), "{detail}");
        assert!(detail.contains("ulimit -u"), "{detail}");
    }
}
