//! Where in a link's stream a byte stands: follows hellos (docs/wire.md, section 1) and link headers (section 8).

/// A part of what a link carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The hello that opens it.
    Hello,
    /// A link header.
    Header,
    /// A message, or the frame header that stands before a payload.
    Inline,
    /// A payload.
    Payload,
    /// The transfer of state to a process that joins.
    State,
}

/// Bytes that each side sends before the link is up: an opening, and a claim or a verdict.
const OPENING_BYTES: usize = 40;
const HELLO_BYTES: usize = OPENING_BYTES + 56;
const HEADER_BYTES: usize = 32;

/// Who opened a link, and for what.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim {
    pub(super) dialer: u32,
    pub(super) state: bool,
}

/// One direction of a link, as it was sent.
#[derive(Debug)]
pub(super) struct Framing {
    part: Part,
    left: usize,
    /// Of a hello or header, until it is complete.
    seen: Vec<u8>,
    payload: usize,
}

impl Framing {
    pub(super) fn new() -> Self {
        Self { part: Part::Hello, left: HELLO_BYTES, seen: Vec::new(), payload: 0 }
    }

    /// How many of these bytes, which come next, are of one part, and of which. After a hello, [`Framing::begin`] is due.
    pub(super) fn next(&mut self, bytes: &[u8]) -> (Part, usize) {
        while self.left == 0 {
            self.turn();
        }
        let (part, taken) = (self.part, bytes.len().min(self.left));
        if matches!(part, Part::Hello | Part::Header) {
            self.seen.extend_from_slice(&bytes[..taken]);
        }
        if part != Part::State {
            self.left -= taken;
        }
        (part, taken)
    }

    pub(super) fn is_through_hello(&self) -> bool {
        self.part == Part::Hello && self.left == 0
    }

    /// What the dialer said in its hello.
    pub(super) fn claim(&self) -> Claim {
        Claim { dialer: self.word(OPENING_BYTES), state: self.word(OPENING_BYTES + 20) == 1 }
    }

    /// The hello is over.
    pub(super) fn begin(&mut self, state: bool) {
        self.seen.clear();
        (self.part, self.left) = if state { (Part::State, usize::MAX) } else { (Part::Header, HEADER_BYTES) };
    }

    fn turn(&mut self) {
        (self.part, self.left) = match self.part {
            Part::Header => {
                self.payload = self.word(8) as usize;
                (Part::Inline, usize::from(u16::from_le_bytes([self.seen[6], self.seen[7]])))
            }
            Part::Inline => (Part::Payload, self.payload),
            Part::Payload | Part::Hello | Part::State => (Part::Header, HEADER_BYTES),
        };
        self.seen.clear();
    }

    fn word(&self, at: usize) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|byte| self.seen[at + byte]))
    }
}
