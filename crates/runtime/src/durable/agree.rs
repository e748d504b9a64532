//! How ranks tell each other what to do, and why not: a text from the lowest rank that has something to say.
//!
//! One allreduce of a small tensor. Each element has four bytes of the text below a number that is higher for lower
//! ranks, so that the maximum of all ranks' elements is the text of one of them, in one exchange, on every rank. Each
//! tensor is used once between two commits: so where steps are redone, these exchanges are too, and never the reason
//! that a step has to be aborted.

use std::sync::Arc;
use std::time::Duration;

use gradwire_proto::session::Recovery;
use gradwire_proto::{DType, Epoch, Fault, FaultKind, Rank, ReduceOp};

use super::again::LastSave;
use super::owner::{Ours, SaveIdentity};
use crate::engine::Submission;
use crate::handle::{Handle, Tensor};
use crate::{Group, TensorSpec};

const BYTES_MAX: usize = 512;
const ELEMENTS: u64 = (BYTES_MAX as u64 + 2).div_ceil(4);
const TENSORS: usize = 6;
const LOWEST_RANK: i64 = (u32::MAX >> 1) as i64;

/// What a group needs for saving and restoring.
#[derive(Debug)]
pub(crate) struct Durable {
    tensors: Vec<Tensor>,
    pub(super) ours: Ours,
    pub(super) last: LastSave,
}

/// An exchange, in the order in which a group may do them between two commits.
#[derive(Clone, Copy, Debug)]
pub(super) enum Round {
    Call,
    Written,
    Published,
    Through,
    Opened,
    Filled,
}

/// What came of an exchange.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Heard {
    Nothing,
    Said(Rank, Vec<u8>),
    /// A rank was lost, and what was said with it.
    Lost,
}

impl Durable {
    /// The tensors that it has to have, declared with the group.
    pub(crate) fn specs() -> impl Iterator<Item = TensorSpec> {
        let spec = |number| TensorSpec::new(format!("gradwire.state.{number}"), &[ELEMENTS], DType::I64);
        (0..TENSORS).map(move |number| spec(number).reduce(ReduceOp::Max))
    }

    pub(crate) fn new(tensors: Vec<Tensor>, identity: SaveIdentity) -> Self {
        Self { tensors, ours: Ours::new(identity), last: LastSave::default() }
    }
}

impl Group {
    /// Collective: says `text`, or nothing, and hears what the lowest rank says that has something to say. `since`: the
    /// membership view that the whole began in.
    pub(super) fn say(
        &self,
        round: Round,
        text: Option<&[u8]>,
        patience: Duration,
        since: Epoch,
    ) -> Result<Heard, Fault> {
        let Some(tensor) = self.durable.tensors.get(round as usize) else { return Ok(Heard::Nothing) };
        let mut data = self.buffer(tensor)?;
        write(data.as_mut_slice(), self.rank(), text);
        let shared = &tensor.shared;
        // Where steps are aborted when a rank is lost, nobody waits for what others do not begin any more.
        let aborts = self.identity.recovery == Recovery::Abort;
        let begun = self.driver.with_engine(|engine| {
            if aborts && engine.epoch() != since {
                return Ok(false);
            }
            if !shared.begin() {
                let detail = "the state is being saved or restored by another thread";
                return Err(Fault::new(FaultKind::TensorBusy, detail));
            }
            let deadline = Some(patience);
            let heard = self.driver.aborts.heard();
            let submission = Submission { tensor: shared.id, input: None, output: data, deadline, urgent: true, heard };
            engine.submit(submission);
            Ok(true)
        })?;
        if !begun {
            return Ok(Heard::Lost);
        }
        match Handle::new(Arc::clone(shared), Arc::clone(&self.driver)).wait() {
            Ok(done) => Ok(read(done.output.as_slice())),
            Err(error) if error.fault.kind == FaultKind::StepAborted => Ok(Heard::Lost),
            Err(error) => Err(error.fault),
        }
    }
}

/// Longer texts are cut.
fn write(elements: &mut [i64], rank: Rank, text: Option<&[u8]>) {
    let Some(text) = text else { return elements.fill(0) };
    let text = &text[..text.len().min(BYTES_MAX)];
    let mut bytes = [0; ELEMENTS as usize * 4];
    bytes[..2].copy_from_slice(&(text.len() as u16).to_le_bytes());
    bytes[2..2 + text.len()].copy_from_slice(text);
    let place = (LOWEST_RANK - i64::from(rank.0)) << 32;
    for (element, bytes) in elements.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *element = place | i64::from(u32::from_le_bytes(*bytes));
    }
}

fn read(elements: &[i64]) -> Heard {
    let Some(first) = elements.first().filter(|first| **first != 0) else { return Heard::Nothing };
    let rank = Rank((LOWEST_RANK - (first >> 32)) as u32);
    let mut bytes = elements.iter().flat_map(|element| (*element as u32).to_le_bytes());
    let length = u16::from_le_bytes([bytes.next().unwrap_or(0), bytes.next().unwrap_or(0)]);
    Heard::Said(rank, bytes.take(usize::from(length)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn maximum(said: &[(u32, Option<&[u8]>)]) -> Heard {
        let mut all = vec![i64::MIN; ELEMENTS as usize];
        for (rank, text) in said {
            let mut elements = vec![-1; ELEMENTS as usize];
            write(&mut elements, Rank(*rank), *text);
            all.iter_mut().zip(elements).for_each(|(all, one)| *all = one.max(*all));
        }
        read(&all)
    }

    #[test]
    fn the_maximum_is_the_text_of_the_lowest_rank_that_says_something() {
        assert_eq!(maximum(&[(0, None), (7, None)]), Heard::Nothing);
        assert_eq!(maximum(&[(1, Some(b"zz")), (0, None)]), Heard::Said(Rank(1), b"zz".to_vec()));
        let (high, low) = ([0xff; BYTES_MAX], [0; 3]);
        assert_eq!(maximum(&[(1023, Some(&high)), (2, Some(&low))]), Heard::Said(Rank(2), low.to_vec()));
        assert_eq!(maximum(&[(0, Some(b""))]), Heard::Said(Rank(0), Vec::new()));
        assert_eq!(maximum(&[(9, Some(&[7; 600]))]), Heard::Said(Rank(9), vec![7; BYTES_MAX]));
    }
}
