//! Declaring tensors: exchanging what every rank declares, and laying out memory for it.

use std::time::Duration;

use gradwire_proto::frame::Location;
use gradwire_proto::manifest::{Manifest, agree};
use gradwire_proto::{Fault, FaultKind, Rank, TensorId};
use gradwire_transport::Pool;

use super::{Engine, Slot};
use crate::handle::TensorShared;

impl Engine {
    /// Begins a round. It is over when [`Engine::round`] has grown, or the engine has failed.
    pub(crate) fn declare(&mut self, manifest: &Manifest, deadline: Option<Duration>) -> Result<(), Fault> {
        for tensor in &manifest.tensors {
            if self.tensor(&tensor.name).is_some() {
                let detail = "it is declared already: declare every tensor once";
                return Err(Fault::new(FaultKind::InvalidArgument, detail).tensor(tensor.name.clone()));
            }
        }
        let mut bytes = Vec::new();
        manifest.encode(&mut bytes)?;
        let now = self.now();
        self.session.declare(bytes, now, deadline.map(|deadline| deadline.as_nanos() as u64))
    }

    /// How many declaration rounds are over.
    pub(crate) const fn round(&self) -> u32 {
        self.session.round()
    }

    /// The tensor of this name.
    pub(crate) fn tensor(&self, name: &str) -> Option<TensorId> {
        let tensors = &self.session.plan().tensors;
        tensors.iter().position(|tensor| tensor.name == name).map(|index| TensorId(index as u32))
    }

    /// Every rank's manifest is here: all come to the same plan, or to the same fault.
    pub(super) fn agree(&mut self) {
        if let Err(fault) = self.try_agree() {
            self.session.fail(fault);
        }
    }

    fn try_agree(&mut self) -> Result<(), Fault> {
        let mut manifests = Vec::new();
        for (rank, bytes) in self.session.take_manifests().iter().enumerate() {
            let rank = Rank(rank as u32);
            let manifest = Manifest::decode(bytes)
                .map_err(|malformed| Fault::violation(rank, &format!("bad declarations ({})", malformed.0)))?;
            manifests.push(manifest);
        }
        let declarations = agree(&manifests)?;
        let first = self.session.lay_out(&declarations);
        self.memory.discard_from(first);
        self.slots.truncate(self.session.plan().tensors.len() - declarations.len());
        let me = self.rank();
        let plan = self.session.plan();
        let laid_out = self.memory.add_round(plan, first, me, &self.capabilities, &mut *self.transport);
        self.make_slots();
        match laid_out {
            Ok(()) => self.session.prepare(&self.landings()),
            Err(fault) => self.resign_for_want(fault),
        }
        Ok(())
    }

    /// Makes room for the buffers of all tensors that are declared.
    pub(super) fn make_slots(&mut self) {
        let plan = self.session.plan();
        for index in self.slots.len()..plan.tensors.len() {
            let tensor = &plan.tensors[index];
            let bucket = plan.bucket(tensor.bucket);
            let bytes = usize::try_from(tensor.elements * bucket.dtype.size() as u64).unwrap_or(usize::MAX);
            let shared = TensorShared::new(TensorId(index as u32), tensor, bucket, Pool::new(bytes));
            self.slots.push(Slot { input: None, output: None, retained: None, replaces: false, shared });
        }
        self.finishing.reserve(self.slots.len());
    }

    /// By rank: where contributions to the latest round are to be written.
    pub(super) fn landings(&self) -> Vec<Location> {
        self.memory.rounds.last().map_or(Vec::new(), |round| {
            let of = |buffer: &Option<gradwire_transport::Buffer>| {
                buffer.as_ref().map_or(Location::default(), |buffer| Location { region: buffer.key(), offset: 0 })
            };
            round.landings.iter().map(of).collect()
        })
    }
}
