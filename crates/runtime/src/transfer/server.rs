//! Answers one newcomer's questions.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use gradwire_proto::frame::JobTag;
use gradwire_proto::transfer::{Ask, Given, No, Reason, Snapshot};
use gradwire_transport::establish::StateStream;

use super::holder::{Asker, Holder};
use super::share::Share;
use super::stream::FrameStream;
use crate::system;

/// A newcomer that takes nothing, or asks nothing, for so long is given up.
const IDLE_MAX: Duration = Duration::from_secs(30);
/// How often a newcomer that waits is told that it has to.
const WAIT_EVERY: Duration = Duration::from_millis(500);

/// Serves until the newcomer ends the stream, or is given up.
pub(super) fn serve(stream: StateStream, job: JobTag, holder: &Arc<Holder>, asker: Asker) {
    let stream = FrameStream::new(stream, job, None);
    let mut server = Server { stream, holder, asker, share: None };
    // The trainer's threads come first.
    system::yield_to_others();
    let ended = server.stream.stream.set_timeout(IDLE_MAX).and_then(|()| server.run());
    holder.release(asker);
    if let Err(error) = ended
        && error.kind() != io::ErrorKind::UnexpectedEof
    {
        tracing::info!(%error, "a newcomer that asked for the state is not served any more");
    }
}

struct Server<'a> {
    stream: FrameStream,
    holder: &'a Arc<Holder>,
    asker: Asker,
    share: Option<Arc<Share>>,
}

impl Server<'_> {
    fn run(&mut self) -> io::Result<()> {
        loop {
            let ask = self.stream.read_ask()?;
            self.holder.hear(self.asker);
            match ask {
                Ask::Outline => self.stream.give(Given::Outline, &self.holder.outline().encode())?,
                Ask::Snapshot { commits, seat, holders } => self.snapshot(commits, seat, holders)?,
                Ask::Piece(piece) => self.piece(piece)?,
                Ask::Results { commits, seat } => {
                    self.share = None;
                    self.results(commits, seat)?;
                }
                Ask::Sums => self.sums()?,
            }
        }
    }

    fn refuse(&mut self, no: &No) -> io::Result<()> {
        self.stream.give(Given::No, &no.encode())
    }

    /// Asks again and again for what takes a while, and says that it does; then gives it, or says why not.
    fn await_it<T>(&mut self, mut ask: impl FnMut(&mut Self) -> Result<Option<T>, No>) -> io::Result<Option<T>> {
        loop {
            match ask(self) {
                Ok(Some(found)) => return Ok(Some(found)),
                Ok(None) => {
                    self.stream.give(Given::Wait, &[])?;
                    self.holder.hear(self.asker);
                }
                Err(no) => return self.refuse(&no).map(|()| None),
            }
        }
    }

    fn snapshot(&mut self, commits: u64, seat: u32, holders: u32) -> io::Result<()> {
        self.share = None;
        if let Err(no) = self.holder.wish(self.asker, commits, seat, holders) {
            return self.refuse(&no);
        }
        if let Some(share) = self.await_it(|server| server.holder.share(server.asker, WAIT_EVERY))? {
            self.stream.give(Given::Snapshot, &Snapshot { parts: share.parts.clone() }.encode())?;
            self.share = Some(share);
        }
        Ok(())
    }

    /// The share, or why it is not there.
    fn kept(&self) -> Result<Arc<Share>, No> {
        self.share.clone().ok_or_else(|| self.holder.no(Reason::TooLate, "no state is kept for this newcomer"))
    }

    fn piece(&mut self, piece: u32) -> io::Result<()> {
        let found = self.await_it(|server| {
            let share = server.kept()?;
            let found = share.piece(piece, WAIT_EVERY).map_err(|why| server.holder.no(Reason::TooLate, &why))?;
            Ok(found.map(|copied| (share, copied)))
        })?;
        found.map_or(Ok(()), |(share, copied)| self.stream.give_piece(share.file(), copied))
    }

    fn sums(&mut self) -> io::Result<()> {
        let sums = self.await_it(|server| {
            let sums = server.kept()?.sums(WAIT_EVERY);
            sums.map_err(|why| server.holder.no(Reason::TooLate, &why))
        })?;
        sums.map_or(Ok(()), |sums| self.stream.give(Given::Sums, &sums.encode()))
    }

    fn results(&mut self, commits: u64, seat: u32) -> io::Result<()> {
        let (results, made) = match self.holder.results(self.asker, commits, seat) {
            Ok(found) => found,
            Err(no) => return self.refuse(&no),
        };
        self.stream.give(Given::Results, &results.encode())?;
        for unit in made {
            self.stream.send(unit.header(results.epoch), &unit.bytes)?;
        }
        Ok(())
    }
}

/// What a newcomer hears that cannot be served now.
pub(super) fn turn_away(stream: StateStream, job: JobTag, why: &str) {
    let mut stream = FrameStream::new(stream, job, None);
    let no = No { reason: Reason::Busy, commits: 0, detail: why.to_owned() };
    let said = stream.stream.set_timeout(Duration::from_secs(1)).and_then(|()| stream.give(Given::No, &no.encode()));
    if let Err(error) = said {
        tracing::debug!(%error, "a newcomer that was turned away did not hear why");
    }
}
