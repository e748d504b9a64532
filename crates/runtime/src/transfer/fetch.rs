//! Getting state from several members at once.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Mutex, PoisonError};

use gradwire_proto::transfer::{Ask, Given, No, Sums, keeps};
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

/// Pieces that are still to be had, by the first holder that keeps them.
struct Queue<'a> {
    classes: Mutex<Vec<VecDeque<Target<'a>>>>,
    holders: u32,
}

impl<'a> Queue<'a> {
    /// The next piece that this holder keeps: those that it is the first to keep come first.
    fn take(&self, seat: u32) -> Option<Target<'a>> {
        let mut classes = self.classes.lock().unwrap_or_else(PoisonError::into_inner);
        (0..self.holders)
            .map(|distance| (seat + self.holders - distance) % self.holders)
            .take_while(|class| keeps(*class, seat, self.holders))
            .find_map(|class| classes[class as usize].pop_front())
    }

    fn put_back(&self, target: Target<'a>) {
        let mut classes = self.classes.lock().unwrap_or_else(PoisonError::into_inner);
        classes[(target.0 % self.holders) as usize].push_front(target);
    }

    fn is_empty(&self) -> bool {
        self.classes.lock().unwrap_or_else(PoisonError::into_inner).iter().all(VecDeque::is_empty)
    }
}

/// What came of one member: its pieces with their checksums, and whether it can be asked again.
#[derive(Default)]
struct Got {
    pieces: Vec<(u32, u32)>,
    well: bool,
}

/// Gets every piece from a member that keeps it, all members at once; what one of them fails to give, another one does.
/// Returns the CRC-32 of each, and who gave it; nothing if not all could be had. Members that failed are left out from
/// then on.
///
/// # Errors
/// `System` when there are no threads to be had.
pub(super) fn fetch(sources: &mut Vec<Source>, targets: Vec<Target<'_>>) -> Result<Option<Pieces>, Fault> {
    let holders = sources.len() as u32;
    let mut seats: Vec<(u32, &mut Source)> = (0..).zip(sources.iter_mut()).collect();
    let mut classes: Vec<VecDeque<Target<'_>>> = (0..holders).map(|_| VecDeque::new()).collect();
    for target in targets {
        classes[(target.0 % holders) as usize].push_back(target);
    }
    let queue = Queue { classes: Mutex::new(classes), holders };
    let (mut pieces, mut lost) = (Pieces::new(), Vec::new());
    loop {
        let got: Vec<Got> =
            at_once(seats.iter_mut(), Got::default, |(seat, source)| fetch_from(&mut source.stream, *seat, &queue))?;
        let before = seats.len();
        let mut wells = got.iter().map(|got| got.well).collect::<Vec<_>>().into_iter();
        for ((_, source), got) in seats.iter().zip(got) {
            pieces.extend(got.pieces.into_iter().map(|(piece, crc)| (piece, (crc, source.rank))));
            lost.extend((!got.well).then_some(source.rank));
        }
        seats.retain(|_| wells.next() == Some(true));
        let all = queue.is_empty();
        // Whoever was through before another one failed takes over.
        if all || seats.len() == before {
            drop(queue);
            sources.retain(|source| !lost.contains(&source.rank));
            return Ok(all.then_some(pieces));
        }
    }
}

/// Gets pieces from one member until there are none that it keeps.
fn fetch_from<'a>(stream: &mut FrameStream, seat: u32, queue: &Queue<'a>) -> Got {
    let mut asked: VecDeque<Target<'a>> = VecDeque::new();
    let mut got = Got::default();
    let outcome = fetch_window(stream, seat, queue, &mut asked, &mut got.pieces);
    asked.into_iter().for_each(|target| queue.put_back(target));
    if let Err(error) = &outcome {
        tracing::info!(%error, "a member stopped giving its state: others take over");
    }
    got.well = outcome.is_ok();
    got
}

fn fetch_window<'a>(
    stream: &mut FrameStream,
    seat: u32,
    queue: &Queue<'a>,
    asked: &mut VecDeque<Target<'a>>,
    got: &mut Vec<(u32, u32)>,
) -> io::Result<()> {
    loop {
        while asked.len() < WINDOW
            && let Some(target) = queue.take(seat)
        {
            let piece = target.0;
            asked.push_back(target);
            stream.ask(Ask::Piece(piece))?;
        }
        let Some((piece, bytes)) = asked.front_mut() else { return Ok(()) };
        let header = stream.read_given()?;
        match Given::from_code(header.bucket.0) {
            Some(Given::Piece) => {}
            Some(Given::Wait) => {
                stream.read_body(&header, &mut [])?;
                continue;
            }
            _ => return Err(invalid("it does not keep this piece any more")),
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
