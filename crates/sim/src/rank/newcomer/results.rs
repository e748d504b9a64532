//! Getting and applying the results of what follows. What `crates/runtime/src/transfer/follow.rs` is in the product.

use gradwire_codec::{crc32, unpack};
use gradwire_proto::Collective;
use gradwire_proto::manifest::Declaration;
use gradwire_proto::transfer::{Ask, Reason, giver};

use super::{Given, Newcomer, Trouble};
use crate::mutation::Mutation;
use crate::process::{Context, Out};
use crate::rank::stream::{self, Update};
use crate::report::Final;

impl Newcomer {
    /// Asks for what is missing of the next step. Returns false if nothing is.
    pub(super) fn ask_results(&mut self, context: &mut Context<'_>, why: &str) -> Result<bool, Trouble> {
        let (commits, streams, mut asks) = (self.commits, self.streams, false);
        for seat in (0..self.holders).filter(|seat| !self.given.contains_key(seat)) {
            let of = |seat: u32| self.sources.iter().position(|source| source.seat == seat && source.lost.is_none());
            let nth = giver(seat, self.holders, |seat| of(seat).is_some()).and_then(of);
            let Some(nth) = nth else { return Err(Trouble::Again(why.to_owned())) };
            asks = true;
            let source = &mut self.sources[nth];
            // One thing after the other.
            if source.waits.is_none() {
                (source.waits, source.asked) = (Some(context.now), seat);
                let frame = stream::ask(Ask::Results { commits, seat });
                context.out.push(Out::State { to: source.process, stream: streams, frame });
            }
        }
        Ok(asks)
    }

    /// Takes what was asked for. Returns whether the step is not final yet; and why a member gives nothing any more.
    pub(super) fn take_results(&mut self, context: &mut Context<'_>) -> (bool, String) {
        let (mut not_yet, mut why) = (false, "members answered differently".to_owned());
        for source in &mut self.sources {
            let odd = match source.answer.take() {
                Some(Given::Results(results, updates)) => {
                    self.given.insert(source.asked, (results, updates));
                    continue;
                }
                Some(Given::No(no)) if no.reason == Reason::NotYet => {
                    not_yet = true;
                    continue;
                }
                Some(Given::No(no)) => no.detail,
                Some(_) => "another answer".to_owned(),
                None => continue,
            };
            why = format!("{}: {odd}", source.rank);
            source.lost = Some(why.clone());
            context.out.push(Out::StateEnd { to: source.process, stream: self.streams });
        }
        (not_yet, why)
    }

    /// Applies the results of the next step, which are here.
    pub(super) fn apply_results(&mut self, context: &mut Context<'_>) -> Result<(), Trouble> {
        let given = std::mem::take(&mut self.given);
        let again = || Trouble::Again("members answered differently".to_owned());
        let (head, _) = given.values().next().ok_or_else(again)?;
        if !given.values().all(|(other, _)| (other.epoch, &other.members) == (head.epoch, &head.members)) {
            return Err(again());
        }
        let members = head.members.clone();
        let results = self.place(given.into_values().flat_map(|(_, updates)| updates))?;
        if !context.has(Mutation::SkipResults) || self.commits % 3 != 1 {
            self.state.apply(self.commits, &members, &results);
        }
        self.commits += 1;
        self.report_state(context);
        Ok(())
    }

    /// Puts a step's results together: of each tensor that was reduced for all, what it is.
    fn place(&self, updates: impl Iterator<Item = Update>) -> Result<Vec<Option<Final>>, Trouble> {
        let bad = || Trouble::Again("results that do not fit what was declared".to_owned());
        let whole = |tensor: &Declaration| vec![0; tensor.elements() as usize * tensor.dtype.size()];
        let mut memory: Vec<Vec<u8>> = self.tensors.iter().map(whole).collect();
        let mut covered = vec![0; self.tensors.len()];
        let mut nonfinite = vec![false; self.tensors.len()];
        for Update { header, bytes } in updates {
            let index = header.unit_first.index();
            let (tensor, wire) = self.tensors.get(index).zip(header.dtype).ok_or_else(bad)?;
            let start = header.location.offset as usize * tensor.dtype.size();
            let range = start..start + header.unit_count as usize * tensor.dtype.size();
            let place = memory[index].get_mut(range).ok_or_else(bad)?;
            nonfinite[index] |= unpack(wire, tensor.dtype, &bytes, place).map_err(|_| bad())?;
            covered[index] += u64::from(header.unit_count);
        }
        let mut results = Vec::new();
        for (index, tensor) in self.tensors.iter().enumerate() {
            let reduced = tensor.collective == Collective::AllReduce && tensor.elements() > 0;
            if covered[index] != 0 && covered[index] != tensor.elements() || reduced && covered[index] == 0 {
                return Err(bad());
            }
            results.push(reduced.then(|| Final { crc: crc32(&memory[index]), nonfinite: nonfinite[index] }));
        }
        Ok(results)
    }
}
