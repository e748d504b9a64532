//! Getting state from several members at once.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Mutex, PoisonError};

use gradwire_proto::transfer::{Ask, Given, No, Snapshot, keeps};
use gradwire_proto::{Fault, FaultKind, Rank};

use super::stream::{Answer, FrameStream, invalid};

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
pub(super) fn ask_all<T: Send>(
    sources: &mut [Source],
    ask: impl Fn(u32) -> Ask + Sync,
    read: impl Fn(&mut FrameStream) -> Result<T, Trouble> + Sync,
) -> Vec<Result<T, Trouble>> {
    let (ask, read) = (&ask, &read);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..)
            .zip(sources.iter_mut())
            .map(|(seat, source)| {
                scope.spawn(move || {
                    source.stream.ask(ask(seat))?;
                    read(&mut source.stream)
                })
            })
            .collect();
        let panicked = || Err(Trouble::Lost(io::Error::other("the thread that reads panicked")));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| panicked())).collect()
    })
}

/// The body of an answer.
pub(super) fn body(stream: &mut FrameStream, wanted: Given) -> Result<Vec<u8>, Trouble> {
    match stream.read_answer(wanted)? {
        Answer::Body(body) => Ok(body),
        Answer::No(no) => Err(Trouble::No(no)),
    }
}

/// The checksums of all pieces, on which all members that keep one agree.
///
/// # Errors
/// `Diverged`, when two members' states differ; nothing if a piece is not kept by anybody.
pub(super) fn agreed_sums(
    sources: &[Source],
    snapshots: &[Snapshot],
    part_of: &dyn Fn(u32) -> String,
) -> Result<BTreeMap<u32, u32>, Fault> {
    let mut sums: BTreeMap<u32, (u32, Rank)> = BTreeMap::new();
    for (source, snapshot) in sources.iter().zip(snapshots) {
        for (piece, crc) in &snapshot.sums {
            let (known, by) = *sums.entry(*piece).or_insert((*crc, source.rank));
            if known != *crc {
                let detail = format!(
                    "{by} and {} have different states in part '{}': they do not train the same model any more; start the job again from what was saved",
                    source.rank,
                    part_of(*piece)
                );
                return Err(Fault::new(FaultKind::Diverged, detail).at(source.rank));
            }
        }
    }
    Ok(sums.into_iter().map(|(piece, (crc, _))| (piece, crc)).collect())
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

/// Gets every piece from a member that keeps it, all members at once; what one of them fails to give, another one does.
/// Returns whether all is here.
pub(super) fn fetch(sources: &mut [Source], sums: &BTreeMap<u32, u32>, targets: Vec<Target<'_>>) -> bool {
    let holders = sources.len() as u32;
    let mut classes: Vec<VecDeque<Target<'_>>> = (0..holders).map(|_| VecDeque::new()).collect();
    for target in targets {
        classes[(target.0 % holders) as usize].push_back(target);
    }
    let queue = Queue { classes: Mutex::new(classes), holders };
    let mut well = vec![true; sources.len()];
    loop {
        let outcomes: Vec<bool> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..)
                .zip(sources.iter_mut())
                .zip(&well)
                .map(|((seat, source), well)| {
                    let queue = &queue;
                    well.then(|| scope.spawn(move || fetch_from(&mut source.stream, seat, queue, sums)))
                })
                .collect();
            threads.into_iter().map(|thread| thread.is_some_and(|thread| thread.join().is_ok_and(|ok| ok))).collect()
        });
        if queue.is_empty() {
            return true;
        }
        // Whoever was through before another one failed takes over.
        if outcomes == well {
            return false;
        }
        well = outcomes;
    }
}

/// Gets pieces from one member until there are none that it keeps. Returns whether it can be asked again.
fn fetch_from<'a>(stream: &mut FrameStream, seat: u32, queue: &Queue<'a>, sums: &BTreeMap<u32, u32>) -> bool {
    let mut asked: VecDeque<Target<'a>> = VecDeque::new();
    let outcome = fetch_window(stream, seat, queue, sums, &mut asked);
    asked.into_iter().for_each(|target| queue.put_back(target));
    if let Err(error) = &outcome {
        tracing::info!(%error, "a member stopped giving its state: others take over");
    }
    outcome.is_ok()
}

fn fetch_window<'a>(
    stream: &mut FrameStream,
    seat: u32,
    queue: &Queue<'a>,
    sums: &BTreeMap<u32, u32>,
    asked: &mut VecDeque<Target<'a>>,
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
        if header.bucket.0 != Given::Piece as u32 {
            return Err(invalid("it does not keep this piece any more"));
        }
        stream.read_body(&header, bytes)?;
        if sums.get(piece) != Some(&header.payload_crc) {
            return Err(invalid("a piece is not what it was when it was kept"));
        }
        asked.pop_front();
    }
}
