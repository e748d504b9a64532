//! The same training in one process: what the ranks' result is held against.
//!
//! Every rank's gradients are computed one after the other, and combined by the codec's reference, which adds in rank
//! order through the same wire format and knows nothing of shards, transports and arrival.

use gradwire_proto::{DType, Fault, ReduceOp, WireFormat};

use super::data::{Digits, Samples, Split, gradient_scale};
use super::history::{self, History};
use super::model::{Model, Momentum, PARAMETERS};

/// What the ranks were asked to do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Task {
    /// How many there were at the beginning.
    pub(super) ranks: u32,
    pub(super) steps: u32,
    pub(super) wire: WireFormat,
    pub(super) seed: u64,
}

/// What it comes to.
#[derive(Debug)]
pub(super) struct Trained {
    pub(super) model: Model,
    /// By step, from the first: [`history::checksum`] of the means.
    pub(super) trail: Vec<u32>,
}

/// Trains as the ranks would, with exactly those contributors in each step that `history` names.
///
/// # Errors
/// A [`Fault`] of kind `System` when the digits are damaged; whatever the codec has against a step without contributors.
pub(super) fn train(task: &Task, history: &History) -> Result<Trained, Fault> {
    let split = Split::load()?;
    // Ranks that do not contribute take their part of the batches all the same.
    let ranks = 0..history.ranks_end();
    let mut samples: Vec<Samples> = ranks.map(|rank| Samples::new(rank, task.ranks, task.seed)).collect();
    let wire = task.wire.wire_dtype(DType::F32);
    let mut model = Model::seeded(task.seed);
    let mut optimizer = Momentum::new();
    let mut trail = Vec::with_capacity(task.steps as usize);
    for step in 1..=task.steps {
        let mut gradients = Vec::new();
        for (rank, samples) in (0..).zip(&mut samples) {
            let places = samples.next();
            if history.at(step).contains(&rank) {
                gradients.push(self::gradients(&model, &split.train.select(places), task.ranks)?);
            }
        }
        let mut means = Vec::with_capacity(PARAMETERS.len());
        for index in 0..PARAMETERS.len() {
            let inputs: Vec<&[u8]> = gradients.iter().map(|of_rank| of_rank[index].as_slice()).collect();
            means.push(gradwire_codec::reference(DType::F32, wire, ReduceOp::Mean, &inputs)?);
        }
        for (index, mean) in means.iter().enumerate() {
            let (values, _) = mean.as_chunks::<4>();
            optimizer.update(&mut model, index, values.iter().map(|bytes| f32::from_le_bytes(*bytes)));
        }
        trail.push(history::checksum(means.iter().map(Vec::as_slice)));
    }
    Ok(Trained { model, trail })
}

/// One rank's gradients as bytes, by parameter.
fn gradients(model: &Model, part: &Digits, ranks: u32) -> Result<[Vec<u8>; PARAMETERS.len()], Fault> {
    let mut gradients = [const { Vec::new() }; PARAMETERS.len()];
    model.backward(part, gradient_scale(ranks), |index, gradient| {
        gradients[index] = gradient.iter().copied().flat_map(f32::to_le_bytes).collect();
        Ok::<(), Fault>(())
    })?;
    Ok(gradients)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(ranks: u32, steps: u32, wire: WireFormat, seed: u64) -> Task {
        Task { ranks, steps, wire, seed }
    }

    fn undisturbed(ranks: u32, steps: u32, wire: WireFormat, seed: u64) -> Trained {
        train(&task(ranks, steps, wire, seed), &History::constant(ranks)).expect("train")
    }

    #[test]
    fn the_network_learns_with_any_number_of_ranks_and_any_wire_format() {
        let split = Split::load().expect("load");
        for (ranks, wire) in [(1, WireFormat::Fp32), (7, WireFormat::Fp16), (4, WireFormat::Bf16)] {
            let accuracy = undisturbed(ranks, 300, wire, 42).model.accuracy(&split.test);
            assert!(accuracy >= 0.95, "{accuracy} with {ranks} ranks and {wire}");
        }
    }

    #[test]
    fn training_is_a_function_of_its_arguments() {
        let sha256 = |ranks, steps, wire, seed| undisturbed(ranks, steps, wire, seed).model.sha256();
        let usual = sha256(3, 5, WireFormat::Fp32, 1);
        assert_eq!(usual, sha256(3, 5, WireFormat::Fp32, 1));
        assert_ne!(usual, sha256(3, 6, WireFormat::Fp32, 1));
        assert_ne!(usual, sha256(3, 5, WireFormat::Bf16, 1));
        assert_ne!(usual, sha256(3, 5, WireFormat::Fp32, 2));
        assert_ne!(usual, sha256(4, 5, WireFormat::Fp32, 1), "sums over other parts round differently");
    }

    #[test]
    fn who_contributed_shows_from_its_step_on() {
        let of = |sets: &[(u32, &[u32])]| {
            let mut history = History::default();
            sets.iter().for_each(|(step, ranks)| history.push(*step, ranks));
            train(&task(3, 12, WireFormat::Fp32, 1), &history).expect("train")
        };
        let usual = of(&[(1, &[0, 1, 2]), (7, &[0, 2])]);
        let differs = |other: &Trained| (0..12).find(|step| usual.trail[*step] != other.trail[*step]);
        assert_eq!(differs(&of(&[(1, &[0, 1, 2]), (7, &[0, 2])])), None);
        assert_eq!(differs(&of(&[(1, &[0, 1, 2]), (8, &[0, 2])])), Some(6));
        assert_eq!(differs(&of(&[(1, &[0, 1, 2]), (7, &[0, 1])])), Some(6));
        assert_eq!(differs(&of(&[(1, &[0, 1, 2]), (7, &[0, 2]), (12, &[0, 1, 2])])), Some(11));
        assert_eq!(differs(&of(&[(1, &[0, 1, 2]), (7, &[0, 2]), (9, &[0, 2, 3])])), Some(8));
        assert_ne!(usual.model.sha256(), undisturbed(3, 12, WireFormat::Fp32, 1).model.sha256());
    }
}
