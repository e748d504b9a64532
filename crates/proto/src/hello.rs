//! The hello: how the two ends of a new link prove to each other that they know the job's secret, and find out
//! whether they mean each other (docs/wire.md, section 1).
//!
//! [`Handshake`] is sans-IO: the caller reads exactly [`Handshake::wanted`] bytes, hands them to
//! [`Handshake::receive`], and writes what comes back. It brings the nonces (32 random bytes each, never used
//! twice) and the deadline.
//!
//! Invariants: until the dialer has proved the secret, it learns nothing but the acceptor's version and a random
//! nonce. All messages have a fixed size, so that no peer decides how much is read or kept. The two proofs have
//! different purposes and cover everything said before them, so that neither can be echoed, replayed or moved to
//! another link. The hello authenticates; it does not encrypt what follows.

mod messages;
#[cfg(test)]
mod tests;

use alloc::format;
use core::fmt;

use arrayvec::ArrayVec;

use crate::fault::{Fault, FaultKind};
use crate::frame::{JobTag, PROTOCOL_VERSION};
use crate::ids::{Epoch, Rank};
use crate::secret::Secret;
use messages::{Claim, Code, Opening, OpeningError, Verdict};

/// Bytes of a nonce.
pub const NONCE_BYTES: usize = 32;
/// Bytes of the first message of each side. It keeps its layout in every version of the protocol.
pub const OPENING_BYTES: usize = 40;
/// Bytes of the largest message of the hello.
pub const HELLO_BYTES_MAX: usize = 56;

const DIAL_PURPOSE: &str = "gradwire link dial";
const ACCEPT_PURPOSE: &str = "gradwire link accept";

/// Bytes to write to the peer.
pub type HelloBytes = ArrayVec<u8, HELLO_BYTES_MAX>;

/// What a link is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum Purpose {
    /// The exchange between members of an epoch.
    #[default]
    Link = 0,
    /// A process that is no member yet gets what it needs to become one (docs/wire.md, section 12). Epoch and world size
    /// need not agree.
    State = 1,
}

/// Who this rank is: the same for all of its links in one epoch.
#[derive(Clone, Debug)]
pub struct HelloParams {
    /// The job's secret.
    pub secret: Secret,
    /// The job. Never sent, but part of every proof.
    pub job: JobTag,
    /// The membership view that this rank is in.
    pub epoch: Epoch,
    /// This rank.
    pub rank: Rank,
    /// Ranks are below this: the same for the whole job.
    pub world_size: u32,
}

/// What [`Handshake::receive`] asks of the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// To write to the peer before anything else. May be empty.
    pub send: HelloBytes,
    /// The peer, once it has proved who it is, and what it wants. When `send` is written, the link is up and frames may
    /// follow.
    pub done: Option<(Rank, Purpose)>,
}

/// The link is not to be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejected {
    /// Why. At the acceptor it names a rank only when that rank has proved the secret.
    pub fault: Fault,
    /// A last word to write before closing, so that the peer learns why too. May be empty. To a peer that did not
    /// prove the secret it tells nothing but our version, or that its proof was refused.
    pub send: HelloBytes,
}

impl Rejected {
    fn silently(fault: Fault) -> Self {
        Self { fault, send: HelloBytes::new() }
    }

    fn saying(fault: Fault, bytes: &[u8]) -> Self {
        Self { fault, send: bytes.iter().copied().collect() }
    }
}

impl fmt::Display for Rejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fault.fmt(f)
    }
}

impl core::error::Error for Rejected {}

impl From<Rejected> for Fault {
    fn from(rejected: Rejected) -> Self {
        rejected.fault
    }
}

/// One side of one hello. Dropping it keeps nothing.
#[derive(Clone, Debug)]
pub struct Handshake {
    params: HelloParams,
    ours: [u8; OPENING_BYTES],
    state: State,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// Dialer: the acceptor's opening is due.
    DialerOpening { peer: Rank, purpose: Purpose },
    /// Dialer: the acceptor's verdict on our claim is due.
    DialerVerdict { peer: Rank, purpose: Purpose, theirs: [u8; OPENING_BYTES], claim: [u8; Claim::BYTES] },
    /// Acceptor: the dialer's opening is due.
    AcceptorOpening,
    /// Acceptor: the dialer's claim is due.
    AcceptorClaim { theirs: [u8; OPENING_BYTES] },
    /// Proved or rejected.
    Over,
}

impl Handshake {
    /// Begins a hello on a link that this rank opened to reach `peer`. Write the returned message first.
    ///
    /// `nonce` is 32 bytes from a cryptographic source, used for this link only.
    #[must_use]
    pub fn dial(
        params: &HelloParams,
        peer: Rank,
        purpose: Purpose,
        nonce: [u8; NONCE_BYTES],
    ) -> (Self, [u8; OPENING_BYTES]) {
        let ours = Opening { nonce }.encode();
        (Self { params: params.clone(), ours, state: State::DialerOpening { peer, purpose } }, ours)
    }

    /// Waits for a hello on a link that a peer opened. Write nothing before the first [`Handshake::receive`].
    ///
    /// `nonce` is 32 bytes from a cryptographic source, used for this link only.
    #[must_use]
    pub fn accept(params: &HelloParams, nonce: [u8; NONCE_BYTES]) -> Self {
        Self { params: params.clone(), ours: Opening { nonce }.encode(), state: State::AcceptorOpening }
    }

    /// How many bytes to read next: the whole next message, at most [`HELLO_BYTES_MAX`]. 0 when nothing more is to
    /// be read: the hello has ended.
    #[must_use]
    pub const fn wanted(&self) -> usize {
        match self.state {
            State::DialerOpening { .. } | State::AcceptorOpening => OPENING_BYTES,
            State::DialerVerdict { .. } => Verdict::BYTES,
            State::AcceptorClaim { .. } => Claim::BYTES,
            State::Over => 0,
        }
    }

    /// Takes the next message: exactly [`Handshake::wanted`] bytes.
    ///
    /// # Errors
    /// [`Rejected`]: write its last word, close the link. The fault is of kind
    /// - `ProtocolVersion` where the peer speaks another version; names both;
    /// - `SecretMismatch` where a proof does not verify, here or at the peer;
    /// - `WorldMismatch` where a proved peer counts other ranks, or has an impossible rank; `EpochMismatch` where it is in another epoch;
    /// - `AddressUnreachable` where another rank than the one we dialled answered;
    /// - `ProtocolViolation` for everything else: garbage, an echo of our own bytes, a message of another length.
    ///
    /// After an error, and after [`Reply::done`], every further call is an error.
    #[expect(clippy::result_large_err, reason = "happens once per link, and the bytes are what it is for")]
    pub fn receive(&mut self, bytes: &[u8]) -> Result<Reply, Rejected> {
        let due = self.wanted();
        let state = core::mem::replace(&mut self.state, State::Over);
        match state {
            _ if bytes.len() != due => Err(state.misfit(bytes.len(), due)),
            State::DialerOpening { peer, purpose } => self.take_opening_as_dialer(peer, purpose, bytes),
            State::DialerVerdict { peer, purpose, theirs, claim } => {
                self.take_verdict((peer, purpose), &theirs, &claim, bytes)
            }
            State::AcceptorOpening => self.take_opening_as_acceptor(bytes),
            State::AcceptorClaim { theirs } => self.take_claim(&theirs, bytes),
            State::Over => Err(state.misfit(0, 0)),
        }
    }

    /// The fault to report when the link closes before [`Handshake::wanted`] bytes came.
    #[must_use]
    pub fn closed(&self) -> Fault {
        match self.state {
            State::DialerOpening { peer, .. } => Fault::new(
                FaultKind::AddressUnreachable,
                format!(
                    "what listens at {peer}'s address closed the link before it said hello: check that {peer} still \
                     runs and that no other program listens there"
                ),
            )
            .at(peer),
            State::DialerVerdict { peer, .. } => Fault::new(
                FaultKind::AddressUnreachable,
                format!("{peer} closed the link before it answered our proof: check that {peer} still runs"),
            )
            .at(peer),
            _ => Fault::new(
                FaultKind::ProtocolViolation,
                "a connection closed before its hello was complete: nothing to do unless a rank is missing",
            ),
        }
    }

    #[expect(clippy::result_large_err, reason = "see receive")]
    fn take_opening_as_dialer(&mut self, peer: Rank, purpose: Purpose, bytes: &[u8]) -> Result<Reply, Rejected> {
        let theirs = self.read_opening(bytes).map_err(|error| {
            Rejected::silently(match error {
                OpeningError::Version(version) => other_version(&format!("{peer}"), version).at(peer),
                OpeningError::Garbage(what) => Fault::new(
                    FaultKind::ProtocolViolation,
                    format!(
                        "what listens at {peer}'s address is not gradwire ({what}): check that {peer} advertises its \
                         own address and that no other program listens there"
                    ),
                )
                .at(peer),
            })
        })?;
        let params = &self.params;
        let HelloParams { rank, epoch, world_size, .. } = *params;
        let mut claim = Claim { rank, target: peer, epoch, world_size, purpose }.encode();
        let (fields, proof) = claim.split_at_mut(Claim::FIELDS_BYTES);
        proof
            .copy_from_slice(&params.secret.proof(DIAL_PURPOSE, &dial_parts(&params.job, &self.ours, &theirs, fields)));
        self.state = State::DialerVerdict { peer, purpose, theirs, claim };
        Ok(Reply { send: claim.into_iter().collect(), done: None })
    }

    #[expect(clippy::result_large_err, reason = "see receive")]
    fn take_opening_as_acceptor(&mut self, bytes: &[u8]) -> Result<Reply, Rejected> {
        let theirs = self.read_opening(bytes).map_err(|error| match error {
            OpeningError::Version(version) => Rejected::saying(other_version("a peer", version), &self.ours),
            OpeningError::Garbage(what) => Rejected::silently(Fault::new(
                FaultKind::ProtocolViolation,
                format!("a connection did not begin with gradwire's hello ({what}): it was closed"),
            )),
        })?;
        self.state = State::AcceptorClaim { theirs };
        Ok(Reply { send: self.ours.into_iter().collect(), done: None })
    }

    /// The peer's opening as it travelled, checked. An echo of our own nonce is garbage.
    fn read_opening(&self, bytes: &[u8]) -> Result<[u8; OPENING_BYTES], OpeningError> {
        let opening = Opening::decode(bytes)?;
        let theirs = opening.encode();
        if theirs == self.ours { Err(OpeningError::Garbage("our own nonce came back")) } else { Ok(theirs) }
    }

    #[expect(clippy::result_large_err, reason = "see receive")]
    fn take_claim(&mut self, dialer: &[u8; OPENING_BYTES], bytes: &[u8]) -> Result<Reply, Rejected> {
        let params = &self.params;
        let (fields, proof) = bytes.split_at(Claim::FIELDS_BYTES);
        // First of all: nothing that the fields say may show in the answer before this.
        if !params.secret.verifies(DIAL_PURPOSE, &dial_parts(&params.job, dialer, &self.ours, fields), proof) {
            let fault = Fault::new(
                FaultKind::SecretMismatch,
                "a connection did not prove that it knows the job's secret: it was closed. If a rank of this job is \
                 missing, give it the same job name and secret as this one",
            );
            return Err(Rejected::saying(fault, &Verdict::proof_refused()));
        }
        let claim = Claim::decode(fields).map_err(|malformed| {
            Rejected::silently(Fault::new(
                FaultKind::ProtocolViolation,
                format!(
                    "a peer that knows the secret sent a bad hello ({}): run the same release on every rank",
                    malformed.0
                ),
            ))
        })?;
        match disagreement(&claim, params) {
            None => {
                Ok(Reply { send: self.verdict(Code::Welcome, dialer, bytes), done: Some((claim.rank, claim.purpose)) })
            }
            Some((code, fault)) => Err(Rejected { fault, send: self.verdict(code, dialer, bytes) }),
        }
    }

    fn verdict(&self, code: Code, dialer: &[u8; OPENING_BYTES], claim: &[u8]) -> HelloBytes {
        let params = &self.params;
        let mut verdict =
            Verdict { code, rank: params.rank, epoch: params.epoch, world_size: params.world_size }.encode();
        let (fields, proof) = verdict.split_at_mut(Verdict::FIELDS_BYTES);
        proof
            .copy_from_slice(&params.secret.proof(ACCEPT_PURPOSE, &[&params.job.0, dialer, &self.ours, claim, fields]));
        verdict.into_iter().collect()
    }

    #[expect(clippy::result_large_err, reason = "see receive")]
    fn take_verdict(
        &mut self,
        (peer, purpose): (Rank, Purpose),
        acceptor: &[u8; OPENING_BYTES],
        claim: &[u8; Claim::BYTES],
        bytes: &[u8],
    ) -> Result<Reply, Rejected> {
        let params = &self.params;
        let reject = |fault: Fault| Err(Rejected::silently(fault.at(peer)));
        if bytes == Verdict::proof_refused() {
            return reject(Fault::new(
                FaultKind::SecretMismatch,
                format!(
                    "{peer} refused this rank's proof: {} does not have the secret that {peer} has, or is of another \
                     job. Give every rank the same job name and secret",
                    params.rank
                ),
            ));
        }
        let (fields, proof) = bytes.split_at(Verdict::FIELDS_BYTES);
        if !params.secret.verifies(ACCEPT_PURPOSE, &[&params.job.0, &self.ours, acceptor, claim, fields], proof) {
            return reject(Fault::new(
                FaultKind::SecretMismatch,
                format!(
                    "what answers at {peer}'s address did not prove that it knows the job's secret: check that {peer} \
                     advertises its own address, and give every rank the same job name and secret"
                ),
            ));
        }
        match Verdict::decode(fields) {
            Ok(verdict) => match verdict.as_fault(params, peer, purpose) {
                None => Ok(Reply { send: HelloBytes::new(), done: Some((peer, purpose)) }),
                Some(fault) => reject(fault),
            },
            Err(malformed) => reject(Fault::new(
                FaultKind::ProtocolViolation,
                format!("{peer} sent a bad answer to the hello ({}): run the same release on every rank", malformed.0),
            )),
        }
    }
}

impl State {
    /// For bytes that are not the message that is due.
    fn misfit(&self, got: usize, due: usize) -> Rejected {
        let what = format!("got {got} bytes of hello where {due} were due: this link is not to be used");
        let fault = Fault::new(FaultKind::ProtocolViolation, what);
        Rejected::silently(match *self {
            Self::DialerOpening { peer, .. } | Self::DialerVerdict { peer, .. } => fault.at(peer),
            _ => fault,
        })
    }
}

impl Verdict {
    /// What a verdict whose proof verified means to the dialer; `None` is a welcome.
    fn as_fault(&self, ours: &HelloParams, peer: Rank, purpose: Purpose) -> Option<Fault> {
        let (rank, epoch, world_size) = (self.rank, self.epoch, self.world_size);
        let fault = match self.code {
            Code::Welcome if rank == peer && purpose == Purpose::State => return None,
            Code::Welcome if rank == peer && epoch == ours.epoch && world_size == ours.world_size => return None,
            Code::Epoch if epoch != ours.epoch => epochs_differ(peer, epoch, ours),
            Code::WorldSize if world_size != ours.world_size => world_sizes_differ(peer, world_size, ours),
            Code::Target if rank != peer => Fault::new(
                FaultKind::AddressUnreachable,
                format!(
                    "{rank} answers at {peer}'s address: {peer} must advertise an address that reaches it from here"
                ),
            ),
            Code::Rank => rank_impossible(ours.rank, ours.world_size, peer),
            code => Fault::new(
                FaultKind::ProtocolViolation,
                format!(
                    "{peer} answered the hello with {code:?}, but its own values say otherwise: run the same release on every rank"
                ),
            ),
        };
        Some(fault)
    }
}

/// Why a dialer that proved the secret cannot have this link.
fn disagreement(claim: &Claim, ours: &HelloParams) -> Option<(Code, Fault)> {
    let peer = claim.rank;
    let member = claim.purpose == Purpose::Link;
    let (code, fault) = if member && claim.epoch != ours.epoch {
        (Code::Epoch, epochs_differ(peer, claim.epoch, ours))
    } else if claim.world_size != ours.world_size {
        (Code::WorldSize, world_sizes_differ(peer, claim.world_size, ours))
    } else if claim.target != ours.rank {
        let what = format!(
            "{peer} dialled {} and reached {}: {} must advertise an address that reaches it from {peer}",
            claim.target, ours.rank, claim.target
        );
        (Code::Target, Fault::new(FaultKind::AddressUnreachable, what))
    } else if peer == ours.rank || peer.0 >= ours.world_size {
        (Code::Rank, rank_impossible(peer, ours.world_size, ours.rank))
    } else {
        return None;
    };
    Some((code, fault.at(peer)))
}

fn other_version(who: &str, version: u8) -> Fault {
    Fault::new(
        FaultKind::ProtocolVersion,
        format!(
            "{who} speaks protocol version {version}, but this rank speaks version {PROTOCOL_VERSION}: run the same \
             release on every rank"
        ),
    )
}

fn epochs_differ(peer: Rank, theirs: Epoch, ours: &HelloParams) -> Fault {
    Fault::new(
        FaultKind::EpochMismatch,
        format!(
            "{peer} is in {theirs}, but {} is in {}: one of them missed a change of members and must join again",
            ours.rank, ours.epoch
        ),
    )
}

fn world_sizes_differ(peer: Rank, theirs: u32, ours: &HelloParams) -> Fault {
    Fault::new(
        FaultKind::WorldMismatch,
        format!(
            "{peer} was started for {theirs} ranks, but {} for {}: start every rank with the same world size",
            ours.rank, ours.world_size
        ),
    )
}

fn rank_impossible(dialer: Rank, world_size: u32, acceptor: Rank) -> Fault {
    Fault::new(
        FaultKind::WorldMismatch,
        format!(
            "{dialer} cannot open a link to {acceptor} in a job of {world_size} ranks: give every process its own \
             rank from 0 to {}",
            world_size.saturating_sub(1)
        ),
    )
}

fn dial_parts<'a>(job: &'a JobTag, dialer: &'a [u8], acceptor: &'a [u8], fields: &'a [u8]) -> [&'a [u8]; 4] {
    [&job.0, dialer, acceptor, fields]
}
