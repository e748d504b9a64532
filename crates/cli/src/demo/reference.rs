//! The same training in one process: what the ranks' result is held against.
//!
//! Every rank's gradients are computed one after the other, and combined by the codec's reference, which adds in rank
//! order through the same wire format and knows nothing of shards, transports and arrival.

use gradwire_proto::{DType, Fault, ReduceOp, WireFormat};

use super::data::{BATCH, Batches, Split, gradient_scale, share};
use super::model::{Model, Momentum, PARAMETERS};

/// Trains as `ranks` ranks would, and returns the final weights.
///
/// # Errors
/// A [`Fault`] of kind `System` when the digits are damaged.
pub(super) fn train(ranks: u32, steps: u32, wire: WireFormat, seed: u64) -> Result<Model, Fault> {
    let split = Split::load()?;
    let world = ranks as usize;
    let mut batches = Batches::new(Split::TRAIN_IMAGES, BATCH, seed);
    let mut model = Model::seeded(seed);
    let mut optimizer = Momentum::new();
    for _ in 0..steps {
        let batch = batches.next();
        let gradients = (0..world)
            .map(|rank| gradients(&model, &split, &batch[share(BATCH, rank, world)], world))
            .collect::<Result<Vec<_>, Fault>>()?;
        for index in 0..PARAMETERS.len() {
            let inputs: Vec<&[u8]> = gradients.iter().map(|of_rank| of_rank[index].as_slice()).collect();
            let mean = gradwire_codec::reference(DType::F32, wire.wire_dtype(DType::F32), ReduceOp::Mean, &inputs)?;
            let (values, _) = mean.as_chunks::<4>();
            optimizer.update(&mut model, index, values.iter().map(|bytes| f32::from_le_bytes(*bytes)));
        }
    }
    Ok(model)
}

/// One rank's gradients as bytes, by parameter.
fn gradients(
    model: &Model,
    split: &Split,
    places: &[usize],
    world: usize,
) -> Result<[Vec<u8>; PARAMETERS.len()], Fault> {
    let mut gradients = [const { Vec::new() }; PARAMETERS.len()];
    model.backward(&split.train.select(places), gradient_scale(world), |index, gradient| {
        gradients[index] = gradient.iter().copied().flat_map(f32::to_le_bytes).collect();
        Ok::<(), Fault>(())
    })?;
    Ok(gradients)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_network_learns_with_any_number_of_ranks_and_any_wire_format() {
        let split = Split::load().expect("load");
        for (ranks, wire) in [(1, WireFormat::Fp32), (7, WireFormat::Fp16), (4, WireFormat::Bf16)] {
            let model = train(ranks, 300, wire, 42).expect("train");
            let accuracy = model.accuracy(&split.test);
            assert!(accuracy >= 0.95, "{accuracy} with {ranks} ranks and {wire}");
        }
    }

    #[test]
    fn training_is_a_function_of_its_arguments() {
        let sha256 = |ranks, steps, wire, seed| train(ranks, steps, wire, seed).expect("train").sha256();
        let usual = sha256(3, 5, WireFormat::Fp32, 1);
        assert_eq!(usual, sha256(3, 5, WireFormat::Fp32, 1));
        assert_ne!(usual, sha256(3, 6, WireFormat::Fp32, 1));
        assert_ne!(usual, sha256(3, 5, WireFormat::Bf16, 1));
        assert_ne!(usual, sha256(3, 5, WireFormat::Fp32, 2));
        assert_ne!(usual, sha256(4, 5, WireFormat::Fp32, 1), "sums over other parts round differently");
    }
}
