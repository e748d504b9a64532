//! One direction of a link: what comes in goes out, or not.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use super::framing::{Framing, Part};
use super::{End, Link, Shared};

const CHUNK_BYTES: usize = 64 * 1024;

/// Passes on what comes from this side of a link until that ends.
pub(super) fn run(shared: &Shared, link: &Link, side: usize) {
    let (mut from, mut to) = (&link.sides[side], Some(&link.sides[1 - side]));
    let mut framing = Framing::new();
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        let count = match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => count,
            Err(_) => return link.cut(),
        };
        shared.wait(link);
        let bytes = &mut buffer[..count];
        follow(shared, link, side, &mut framing, bytes);
        match due(link, side, bytes.len()) {
            Some((last, end)) => {
                let _ = to.map(|mut to| to.write_all(&bytes[..last]));
                if end == End::Cut {
                    return link.cut();
                }
                let _ = to.take().map(|to| to.shutdown(Shutdown::Write));
            }
            None if to.is_some_and(|mut to: &TcpStream| to.write_all(bytes).is_err()) => return link.cut(),
            None => {}
        }
    }
    // The other direction may still have something to say, as in any network.
    let _ = to.map(|to| to.shutdown(Shutdown::Write));
    if link.is_over.swap(true, Ordering::SeqCst) {
        link.cut();
    }
}

/// Keeps track of what these bytes are, and spoils some.
fn follow(shared: &Shared, link: &Link, side: usize, framing: &mut Framing, bytes: &mut [u8]) {
    let mut at = 0;
    while at < bytes.len() {
        let (part, count) = framing.next(&bytes[at..]);
        if framing.is_through_hello() {
            let claim =
                if side == 0 { Some(*link.claim.get_or_init(|| framing.claim())) } else { link.claim.get().copied() };
            framing.begin(claim.is_some_and(|claim| claim.state));
        }
        spoil(shared, link, part, &mut bytes[at..at + count]);
        at += count;
    }
}

fn spoil(shared: &Shared, link: &Link, part: Part, bytes: &mut [u8]) {
    let mut weather = shared.weather();
    let Some(mut spoil) = weather.spoil.filter(|spoil| spoil.part == part) else { return };
    if spoil.rank.is_some_and(|rank| !link.has(rank)) {
        return;
    }
    let mut at = weather.below(spoil.one_in) as usize;
    while at < bytes.len() && spoil.most > 0 {
        bytes[at] ^= 1 << weather.below(8);
        spoil.most -= 1;
        shared.spoilt.fetch_add(1, Ordering::SeqCst);
        at += 1 + weather.below(spoil.one_in * 2) as usize;
    }
    weather.spoil = Some(spoil);
}

/// Whether the link ends with one of the next `count` bytes: how many of them still pass.
fn due(link: &Link, side: usize, count: usize) -> Option<(usize, End)> {
    let mut order = link.ends[side].lock().unwrap_or_else(PoisonError::into_inner);
    let (after, end) = order.as_mut()?;
    if *after > count as u64 {
        *after -= count as u64;
        return None;
    }
    let due = (*after as usize, *end);
    *order = None;
    Some(due)
}

impl super::Weather {
    fn below(&mut self, most: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % most.max(1)
    }
}
