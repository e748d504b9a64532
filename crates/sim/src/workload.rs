//! What ranks contribute: values that differ between any two contributions, so that a wrong one always shows.

use gradwire_codec::pack;
use gradwire_proto::DType;

use crate::plan::Tensor;
use crate::random::{Draws, mix};

/// Which contribution it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Contribution {
    /// The seed of the plan.
    pub(crate) seed: u64,
    /// The process that makes it.
    pub(crate) process: u32,
    /// How often the process has made it before: a trainer that repeats a step computes it anew.
    pub(crate) attempt: u64,
    /// The step or round that it is made for.
    pub(crate) step: u64,
    /// The tensor.
    pub(crate) tensor: usize,
}

impl Contribution {
    /// Its values, as native elements.
    pub(crate) fn fill(&self, tensor: &Tensor, out: &mut [u8]) {
        let parts = [u64::from(self.process), self.attempt, self.step, self.tensor as u64];
        let mut draws = Draws::new(self.seed, &parts);
        // Few have an infinity or a NaN somewhere.
        let odd = mix(self.seed, &parts).is_multiple_of(64).then(|| draws.below(tensor.elements));
        let dtype: DType = tensor.dtype.into();
        for (at, element) in out.chunks_exact_mut(dtype.size()).enumerate() {
            let bits = draws.next();
            let odd = odd == Some(at as u64);
            match dtype {
                DType::I32 => element.copy_from_slice(&(bits as i32).to_le_bytes()),
                DType::I64 => element.copy_from_slice(&(bits as i64).to_le_bytes()),
                DType::F64 => element.copy_from_slice(&f64::from(float(bits, odd)).to_le_bytes()),
                DType::F32 => element.copy_from_slice(&float(bits, odd).to_le_bytes()),
                // These types convert, and cannot fail to.
                half => _ = pack(DType::F32, half, &float(bits, odd).to_le_bytes(), element),
            }
        }
    }
}

/// A value whose sum with others rounds differently in every order, small enough for binary16.
fn float(bits: u64, odd: bool) -> f32 {
    if odd {
        return [f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0x7fc0_0000)][(bits % 3) as usize];
    }
    let mantissa = (bits >> 40) as f32 / (1u64 << 24) as f32 + 0.5;
    let scale = [0.001, 0.03, 1.0, 17.0][(bits >> 4 & 3) as usize];
    if bits & 1 == 0 { mantissa * scale } else { -mantissa * scale }
}
