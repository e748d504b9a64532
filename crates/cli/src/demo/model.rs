//! The network: 64 pixels, 128 rectified hidden units, 10 classes; its gradients by hand, and the optimizer.
//!
//! The arithmetic is a pure function of its inputs on one kind of CPU, so that ranks and the one-process reference
//! compute the same bits.

use ndarray::{Array2, ArrayView2, Axis, Zip};
use rand_pcg::Pcg64;
use rand_pcg::rand_core::{Rng, SeedableRng};

use super::data::{CLASSES, Digits, PIXELS, hex_sha256};

const HIDDEN: usize = 128;

/// A parameter of the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Parameter {
    /// The name of its gradient's tensor.
    pub(super) name: &'static str,
    /// The name of its momentum as a part of the state.
    pub(super) momentum: &'static str,
    /// Rows and columns. A bias is one row.
    pub(super) shape: (usize, usize),
    /// How soon the next step needs it: the first layer first.
    pub(super) priority: i32,
}

impl Parameter {
    /// Number of elements.
    pub(super) const fn elements(&self) -> usize {
        self.shape.0 * self.shape.1
    }
}

const HIDDEN_WEIGHTS: usize = 0;
const HIDDEN_BIAS: usize = 1;
const OUTPUT_WEIGHTS: usize = 2;
const OUTPUT_BIAS: usize = 3;

/// The parameters, in the order in which [`Model`] holds them.
pub(super) const PARAMETERS: [Parameter; 4] = [
    Parameter { name: "hidden.weight", momentum: "hidden.weight.momentum", shape: (PIXELS, HIDDEN), priority: 1 },
    Parameter { name: "hidden.bias", momentum: "hidden.bias.momentum", shape: (1, HIDDEN), priority: 1 },
    Parameter { name: "output.weight", momentum: "output.weight.momentum", shape: (HIDDEN, CLASSES), priority: 0 },
    Parameter { name: "output.bias", momentum: "output.bias.momentum", shape: (1, CLASSES), priority: 0 },
];

/// Elements of all parameters together.
pub(super) const ELEMENTS: usize = {
    let mut total = 0;
    let mut index = 0;
    while index < PARAMETERS.len() {
        total += PARAMETERS[index].elements();
        index += 1;
    }
    total
};

/// The network's weights.
#[derive(Clone, Debug)]
pub(super) struct Model {
    parameters: [Array2<f32>; PARAMETERS.len()],
}

impl Model {
    /// All weights zero: to be filled by [`Model::set_weights`].
    pub(super) fn zeroed() -> Self {
        Self { parameters: PARAMETERS.map(|parameter| Array2::zeros(parameter.shape)) }
    }

    /// Weights uniform in ±sqrt(6 / inputs) (He et al., 2015, "Delving deep into rectifiers"), biases zero.
    pub(super) fn seeded(seed: u64) -> Self {
        let mut random = Pcg64::seed_from_u64(seed);
        let mut model = Self::zeroed();
        for index in [HIDDEN_WEIGHTS, OUTPUT_WEIGHTS] {
            let bound = (6.0 / PARAMETERS[index].shape.0 as f32).sqrt();
            // 24 random bits make every f32 in steps of 2^-24, exactly.
            model.parameters[index]
                .mapv_inplace(|_| ((random.next_u32() >> 8) as f32 / (1 << 23) as f32 - 1.0) * bound);
        }
        model
    }

    /// All weights, parameter after parameter.
    pub(super) fn weights(&self) -> impl Iterator<Item = f32> {
        self.parameters.iter().flat_map(|parameter| parameter.iter().copied())
    }

    /// Replaces all weights, in the order of [`Model::weights`].
    pub(super) fn set_weights(&mut self, weights: impl IntoIterator<Item = f32>) {
        self.parameters.iter_mut().flatten().zip(weights).for_each(|(weight, new)| *weight = new);
    }

    /// The weights of each parameter.
    pub(super) fn values(&self) -> impl Iterator<Item = &[f32]> {
        self.parameters.iter().map(flat)
    }

    /// The weights of each parameter, to be written to.
    pub(super) fn values_mut(&mut self) -> impl Iterator<Item = &mut [f32]> {
        self.parameters.iter_mut().map(flat_mut)
    }

    /// SHA-256 of all weights as little-endian bytes, in hexadecimal.
    pub(super) fn sha256(&self) -> String {
        let bytes: Vec<u8> = self.weights().flat_map(f32::to_le_bytes).collect();
        hex_sha256([bytes.as_slice()])
    }

    /// Share of `digits` that the network names right.
    pub(super) fn accuracy(&self, digits: &Digits) -> f64 {
        let (_, logits) = self.forward(digits.images.view());
        let right = logits.rows().into_iter().zip(&digits.labels).filter(|(row, label)| {
            let best = row.iter().enumerate().max_by(|one, other| one.1.total_cmp(other.1));
            best.is_some_and(|(class, _)| class == usize::from(**label))
        });
        right.count() as f64 / digits.labels.len() as f64
    }

    /// The gradients of `scale` times the summed cross-entropy over `digits`, handed to `emit` with the parameter's
    /// index as soon as each is known: last layer first. Returns the mean cross-entropy.
    ///
    /// # Errors
    /// What `emit` returns.
    pub(super) fn backward<E>(
        &self,
        digits: &Digits,
        scale: f32,
        mut emit: impl FnMut(usize, &Array2<f32>) -> Result<(), E>,
    ) -> Result<f32, E> {
        let (hidden, logits) = self.forward(digits.images.view());
        let (mut delta, loss) = softmax_cross_entropy(logits, &digits.labels);
        delta *= scale;
        emit(OUTPUT_WEIGHTS, &hidden.t().dot(&delta))?;
        emit(OUTPUT_BIAS, &delta.sum_axis(Axis(0)).insert_axis(Axis(0)))?;

        let mut delta = delta.dot(&self.parameters[OUTPUT_WEIGHTS].t());
        Zip::from(&mut delta).and(&hidden).for_each(|delta, hidden| {
            if *hidden <= 0.0 {
                *delta = 0.0;
            }
        });
        emit(HIDDEN_WEIGHTS, &digits.images.t().dot(&delta))?;
        emit(HIDDEN_BIAS, &delta.sum_axis(Axis(0)).insert_axis(Axis(0)))?;
        Ok(loss)
    }

    /// The hidden units' values and the logits.
    fn forward(&self, images: ArrayView2<'_, f32>) -> (Array2<f32>, Array2<f32>) {
        let mut hidden = images.dot(&self.parameters[HIDDEN_WEIGHTS]) + &self.parameters[HIDDEN_BIAS];
        hidden.mapv_inplace(|value| value.max(0.0));
        let logits = hidden.dot(&self.parameters[OUTPUT_WEIGHTS]) + &self.parameters[OUTPUT_BIAS];
        (hidden, logits)
    }
}

/// Stochastic gradient descent with momentum.
#[derive(Debug)]
pub(super) struct Momentum {
    velocity: [Array2<f32>; PARAMETERS.len()],
}

impl Momentum {
    const RATE: f32 = 0.05;
    const DECAY: f32 = 0.9;

    /// An optimizer at rest.
    pub(super) fn new() -> Self {
        Self { velocity: Model::zeroed().parameters }
    }

    /// The momentum of each parameter.
    pub(super) fn values(&self) -> impl Iterator<Item = &[f32]> {
        self.velocity.iter().map(flat)
    }

    /// The momentum of each parameter, to be written to.
    pub(super) fn values_mut(&mut self) -> impl Iterator<Item = &mut [f32]> {
        self.velocity.iter_mut().map(flat_mut)
    }

    /// Moves parameter `index` of `model` along its `gradient`.
    pub(super) fn update(&mut self, model: &mut Model, index: usize, gradient: impl IntoIterator<Item = f32>) {
        let weights = model.parameters[index].iter_mut().zip(&mut self.velocity[index]);
        for ((weight, velocity), slope) in weights.zip(gradient) {
            *velocity = Self::DECAY * *velocity + slope;
            *weight -= Self::RATE * *velocity;
        }
    }
}

/// All values of a parameter: there is none that does not lie in one piece, row after row.
fn flat(parameter: &Array2<f32>) -> &[f32] {
    parameter.as_slice().unwrap_or_default()
}

fn flat_mut(parameter: &mut Array2<f32>) -> &mut [f32] {
    parameter.as_slice_mut().unwrap_or_default()
}

/// The gradient of the summed cross-entropy with respect to the logits, and the mean cross-entropy.
fn softmax_cross_entropy(mut logits: Array2<f32>, labels: &[u8]) -> (Array2<f32>, f32) {
    let mut loss = 0.0;
    for (mut row, label) in logits.rows_mut().into_iter().zip(labels) {
        let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        row.mapv_inplace(|value| (value - largest).exp());
        let total = row.sum();
        row.mapv_inplace(|value| value / total);
        let right = usize::from(*label);
        loss -= row[right].max(f32::MIN_POSITIVE).ln();
        row[right] -= 1.0;
    }
    (logits, loss / labels.len().max(1) as f32)
}

#[cfg(test)]
mod tests {
    use super::super::data::Split;
    use super::*;

    fn gradients(model: &Model, digits: &Digits) -> (Vec<f32>, f32) {
        let mut gradients = Model::zeroed();
        let loss = model
            .backward(digits, 1.0 / digits.labels.len() as f32, |index, gradient| {
                gradients.parameters[index].assign(gradient);
                Ok::<(), std::convert::Infallible>(())
            })
            .expect("emit cannot fail");
        (gradients.weights().collect(), loss)
    }

    #[test]
    fn gradients_match_finite_differences() {
        let digits = Split::load().expect("load").train.select(&[0, 1, 2, 3, 4, 5, 6, 7]);
        let model = Model::seeded(3);
        let (gradients, _) = gradients(&model, &digits);
        let weights: Vec<f32> = model.weights().collect();
        // Large enough for f32's rounding (an error of about 2e-4), small enough to stay on one side of the kinks.
        let step = 2e-3;
        let mut checked = 0;
        // A prime stride visits all four parameters; their last elements are the biases.
        for place in (0..ELEMENTS).step_by(97).chain(ELEMENTS - CLASSES..ELEMENTS).chain(8192..8192 + 16) {
            let loss_at = |offset: f32| {
                let mut moved = model.clone();
                let shifted = |(index, weight): (usize, &f32)| if index == place { *weight + offset } else { *weight };
                moved.set_weights(weights.iter().enumerate().map(shifted));
                self::gradients(&moved, &digits).1
            };
            let difference = (loss_at(step) - loss_at(-step)) / (2.0 * step);
            let error = (difference - gradients[place]).abs();
            assert!(
                error < 1e-3 + 0.02 * difference.abs(),
                "element {place}: {} against {difference}",
                gradients[place]
            );
            checked += usize::from(gradients[place].abs() > 5e-3);
        }
        assert!(checked > 20, "only {checked} gradients were large enough to tell right from wrong");
    }

    #[test]
    fn gradients_come_last_layer_first_and_stop_at_an_error() {
        let digits = Split::load().expect("load").train.select(&[0, 1]);
        let mut order = Vec::new();
        let result = Model::seeded(0).backward(&digits, 1.0, |index, gradient| {
            assert_eq!(gradient.dim(), PARAMETERS[index].shape);
            order.push(index);
            if order.len() == 3 { Err("full") } else { Ok(()) }
        });
        assert_eq!(result, Err("full"));
        assert_eq!(order, [OUTPUT_WEIGHTS, OUTPUT_BIAS, HIDDEN_WEIGHTS]);
    }

    #[test]
    fn seeds_decide_the_weights_and_the_hash_sees_every_bit() {
        let model = Model::seeded(1);
        assert_eq!(model.sha256(), Model::seeded(1).sha256());
        assert_ne!(model.sha256(), Model::seeded(2).sha256());
        let mut copy = Model::zeroed();
        copy.set_weights(model.weights());
        assert_eq!(copy.sha256(), model.sha256());
        let last = model.weights().count() - 1;
        copy.set_weights(
            model.weights().enumerate().map(|(index, weight)| if index == last { -weight } else { weight }),
        );
        assert_ne!(copy.sha256(), model.sha256(), "0 and -0 are different bits");
        assert_eq!(model.weights().count(), ELEMENTS);
    }

    #[test]
    fn a_perfect_network_is_right_and_a_blind_one_guesses() {
        let split = Split::load().expect("load");
        let blind = Model::zeroed().accuracy(&split.test);
        assert!((0.05..0.15).contains(&blind), "{blind}");
    }
}
