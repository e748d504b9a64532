//! Getting state from several members at once.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use gradwire_proto::transfer::{Ask, Given, No, Sums};
use gradwire_proto::{Fault, FaultKind, Rank};

use super::stream::{Answer, FrameStream, invalid};
use crate::system;

/// Pieces that are asked of one member before the first of them is here.
const WINDOW: usize = 4;

/// A member that gives its state away.
pub(super) struct Source {
    pub(super) rank: Rank,
    pub(super) stream: FrameStream,
}

/// What went wrong with one member.
pub(super) enum Trouble {
    /// The stream ended, or what came over it makes no sense.
    Lost(io::Error),
    /// It said no.
    No(No),
    /// Nothing: it is not asked any more, because another one failed.
    Stopped,
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
    at_once(sources.iter_mut().zip(0..), panicked, |(source, seat)| {
        source.stream.ask(ask(seat))?;
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

/// Gets every piece from the member that keeps it, from all members at once. Returns the CRC-32 of each, and who gave it;
/// or who failed to give what it keeps: nobody else keeps that, nor would a member that is lost give what follows.
///
/// # Errors
/// `System` when there are no threads to be had.
pub(super) fn fetch(
    sources: &mut [Source],
    targets: Vec<Target<'_>>,
) -> Result<Result<Pieces, (Rank, Trouble)>, Fault> {
    let holders = sources.len() as u32;
    let mut shares: Vec<VecDeque<Target<'_>>> = (0..holders).map(|_| VecDeque::new()).collect();
    for target in targets {
        shares[(target.0 % holders) as usize].push_back(target);
    }
    let failed = AtomicBool::new(false);
    let panicked = || Err(io::Error::other("the thread that reads panicked").into());
    let got = at_once(sources.iter_mut().zip(shares), panicked, |(source, share)| {
        // Where it shares cores with the members, their steps come first.
        system::yield_to_others();
        fetch_share(&mut source.stream, share, &failed).inspect_err(|_| failed.store(true, Ordering::Relaxed))
    })?;
    let (mut pieces, mut trouble) = (Pieces::new(), None);
    for (source, got) in sources.iter().zip(got) {
        match got {
            Ok(got) => pieces.extend(got.into_iter().map(|(piece, crc)| (piece, (crc, source.rank)))),
            // Whoever stopped because another one failed is not who is to be named.
            Err(met) if trouble.is_none() || !matches!(met, Trouble::Stopped) => trouble = Some((source.rank, met)),
            Err(_) => {}
        }
    }
    Ok(trouble.map_or(Ok(pieces), Err))
}

/// Gets what one member keeps.
fn fetch_share(
    stream: &mut FrameStream,
    mut wanted: VecDeque<Target<'_>>,
    failed: &AtomicBool,
) -> Result<Vec<(u32, u32)>, Trouble> {
    let (mut asked, mut got) = (VecDeque::new(), Vec::with_capacity(wanted.len()));
    loop {
        while asked.len() < WINDOW
            && let Some(target) = wanted.pop_front()
        {
            stream.ask(Ask::Piece(target.0))?;
            asked.push_back(target);
        }
        let Some((piece, bytes)) = asked.front_mut() else { return Ok(got) };
        if failed.load(Ordering::Relaxed) {
            return Err(Trouble::Stopped);
        }
        let header = stream.read_given()?;
        match Given::from_code(header.bucket.0) {
            Some(Given::Piece) => {}
            Some(Given::Wait) => {
                stream.read_body(&header, &mut [])?;
                continue;
            }
            Some(Given::No) => return Err(Trouble::No(stream.read_no(&header)?)),
            _ => return Err(invalid("another answer than a piece").into()),
        }
        stream.read_body(&header, bytes)?;
        got.push((*piece, header.payload_crc));
        asked.pop_front();
    }
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
