//! The digits: unpacking, checking and splitting them, and who trains on which image at which step.
//!
//! Everything here is a pure function of its inputs, so that all ranks, and the one-process reference, see the same
//! images in the same order.

use std::fmt::Write as _;
use std::io::Read as _;
use std::ops::Range;

use gradwire_proto::{Fault, FaultKind};
use ndarray::{Array2, Axis};
use rand_pcg::Pcg64;
use rand_pcg::rand_core::{Rng, SeedableRng};
use sha2::{Digest, Sha256};

/// Pixels of one image.
pub(super) const PIXELS: usize = 64;
/// Kinds of digits.
pub(super) const CLASSES: usize = 10;
/// Images of one step, over all ranks.
pub(super) const BATCH: usize = 64;

const IMAGES: usize = 1797;
const PIXEL_MAX: u8 = 16;
const SPLIT_SEED: u64 = 1998;
const CONTENTS_BYTES: usize = IMAGES * (PIXELS + 1);
const CONTENTS_SHA256: &str = "ac9fdfe258aefd68bbcff8fd47e4f51466aa6edad18827c191d2c41d9d188f6e";
/// Made by `data/make_digits.py`, which describes the layout; source and licence are in `data/README.md`.
const PACKED: &[u8] = include_bytes!("../../data/digits.bin.zst");

/// Images with their labels.
#[derive(Debug)]
pub(super) struct Digits {
    /// One row of [`PIXELS`] values in 0..=1 per image.
    pub(super) images: Array2<f32>,
    /// The digit that each image shows.
    pub(super) labels: Vec<u8>,
}

impl Digits {
    /// The images at these places.
    pub(super) fn select(&self, places: &[usize]) -> Self {
        let labels = places.iter().map(|place| self.labels[*place]).collect();
        Self { images: self.images.select(Axis(0), places), labels }
    }
}

/// The digits, split once and for all.
#[derive(Debug)]
pub(super) struct Split {
    /// What ranks train on.
    pub(super) train: Digits,
    /// What the trained network is tested on, never trained on.
    pub(super) test: Digits,
}

impl Split {
    /// Images to train on: four fifths of all.
    pub(super) const TRAIN_IMAGES: usize = 1437;

    /// Unpacks and checks the digits that are built into the program.
    ///
    /// # Errors
    /// A [`Fault`] of kind `System` when they are damaged.
    pub(super) fn load() -> Result<Self, Fault> {
        let all = parse(&unpack(PACKED)?);
        let mut places: Vec<usize> = (0..IMAGES).collect();
        shuffle(&mut places, &mut Pcg64::seed_from_u64(SPLIT_SEED));
        let (train, test) = places.split_at(Self::TRAIN_IMAGES);
        Ok(Self { train: all.select(train), test: all.select(test) })
    }
}

/// Which images each step trains on: a fresh shuffle per pass over the data, cut into batches of equal size. What is
/// left over at the end of a pass is left out.
#[derive(Debug)]
struct Batches {
    order: Vec<usize>,
    next: usize,
    batch: usize,
    random: Pcg64,
}

impl Batches {
    /// Batches of `batch` out of `images` images, `batch` being at most `images`. Equal seeds give equal batches.
    fn new(images: usize, batch: usize, seed: u64) -> Self {
        assert!(0 < batch && batch <= images, "batches of {batch} out of {images} images");
        // `next` stands at the end, so that the first call shuffles.
        Self { order: (0..images).collect(), next: images, batch, random: Pcg64::seed_from_u64(seed) }
    }

    /// The places of the next step's images.
    fn next(&mut self) -> &[usize] {
        if self.next + self.batch > self.order.len() {
            shuffle(&mut self.order, &mut self.random);
            self.next = 0;
        }
        let start = self.next;
        self.next += self.batch;
        &self.order[start..self.next]
    }
}

/// Which images one rank trains on: a function of the step, the rank, the seed and the number of ranks that the job began
/// with, whoever is lost or joins. The first ranks share one sequence of batches; those beyond have another.
#[derive(Debug)]
pub(super) struct Samples {
    batches: Batches,
    part: Range<usize>,
}

impl Samples {
    /// Those of `rank`, in a job that began with `ranks` ranks.
    pub(super) fn new(rank: u32, ranks: u32, seed: u64) -> Self {
        let batches = Batches::new(Split::TRAIN_IMAGES, BATCH, seed.wrapping_add(u64::from(rank / ranks)));
        Self { batches, part: share(BATCH, (rank % ranks) as usize, ranks as usize) }
    }

    /// The places of the next step's images.
    pub(super) fn next(&mut self) -> &[usize] {
        &self.batches.next()[self.part.clone()]
    }

    /// Leaves out the images of so many steps: a rank that joins later has the same ones as if it had always been there.
    pub(super) fn skip(&mut self, steps: u32) {
        for _ in 0..steps {
            self.batches.next();
        }
    }
}

/// The part of a batch of `batch` images that `rank` of `world` ranks computes: parts differ by at most one image.
fn share(batch: usize, rank: usize, world: usize) -> Range<usize> {
    batch * rank / world..batch * (rank + 1) / world
}

/// What the gradients of one rank's summed loss are multiplied with, so that their mean over all of `world` ranks is the
/// gradient of the batch's mean loss, whatever the size of each rank's part; and close to that over some of them.
pub(super) fn gradient_scale(world: u32) -> f32 {
    world as f32 / BATCH as f32
}

/// SHA-256 in lower-case hexadecimal.
pub(super) fn hex_sha256<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(part);
    }
    hash.finalize().iter().fold(String::with_capacity(64), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn unpack(packed: &[u8]) -> Result<Vec<u8>, Fault> {
    let damaged = |what: &str| {
        Fault::new(
            FaultKind::System,
            format!("the digits built into this program are damaged ({what}): install it again"),
        )
    };
    let mut contents = Vec::with_capacity(CONTENTS_BYTES);
    zstd::stream::read::Decoder::new(packed)
        .and_then(|decoder| decoder.take(CONTENTS_BYTES as u64 + 1).read_to_end(&mut contents))
        .map_err(|error| damaged(&error.to_string()))?;
    if contents.len() != CONTENTS_BYTES {
        return Err(damaged(&format!("{} bytes instead of {CONTENTS_BYTES}", contents.len())));
    }
    let found = hex_sha256([contents.as_slice()]);
    if found != CONTENTS_SHA256 {
        return Err(damaged(&format!("SHA-256 {found} instead of {CONTENTS_SHA256}")));
    }
    Ok(contents)
}

/// The contents as images: a plane per pixel, then the labels. The checksum was checked, so the values are good.
fn parse(contents: &[u8]) -> Digits {
    let (planes, labels) = contents.split_at(IMAGES * PIXELS);
    let pixel = |(image, pixel): (usize, usize)| f32::from(planes[pixel * IMAGES + image]) / f32::from(PIXEL_MAX);
    Digits { images: Array2::from_shape_fn((IMAGES, PIXELS), pixel), labels: labels.to_vec() }
}

/// Fisher and Yates's shuffle. Our own few lines, because a library's may change between versions, and with it the
/// weights that a seed gives.
fn shuffle(places: &mut [usize], random: &mut Pcg64) {
    for end in (1..places.len()).rev() {
        // The high half of the product is below `end + 1`; its bias is below 2^-50 here.
        let draw = (u128::from(random.next_u64()) * (end as u128 + 1)) >> 64;
        places.swap(end, draw as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digits_load_and_split_into_fixed_parts() {
        let split = Split::load().expect("load");
        assert_eq!(split.train.images.dim(), (Split::TRAIN_IMAGES, PIXELS));
        assert_eq!(split.test.images.dim(), (IMAGES - Split::TRAIN_IMAGES, PIXELS));
        assert!(split.train.images.iter().all(|value| (0.0..=1.0).contains(value)));
        // Figures of the set itself: sums over both parts do not depend on the split.
        let ink = split.train.images.sum() + split.test.images.sum();
        assert_eq!((ink * f32::from(PIXEL_MAX)).round(), 561_718.0);
        let mut counts = [0; CLASSES];
        for label in split.train.labels.iter().chain(&split.test.labels) {
            counts[usize::from(*label)] += 1;
        }
        assert_eq!(counts, [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]);
        // The split itself: the first labels of each part, so that it cannot change unnoticed.
        assert_eq!(split.train.labels[..8], [4, 9, 5, 4, 8, 4, 2, 3]);
        assert_eq!(split.test.labels[..8], [1, 6, 8, 8, 2, 0, 9, 9]);
    }

    #[test]
    fn damaged_digits_are_refused() {
        let mut packed = PACKED.to_vec();
        let middle = packed.len() / 2;
        packed[middle] ^= 1;
        for damaged in [&packed[..], &PACKED[..middle], &[], b"garbage"] {
            let fault = unpack(damaged).expect_err("must be refused");
            assert_eq!(fault.kind, FaultKind::System);
            assert!(fault.detail.contains("damaged"), "{fault}");
        }
        let other = zstd::encode_all(&vec![0; CONTENTS_BYTES][..], 1).expect("encode");
        assert!(unpack(&other).expect_err("wrong contents").detail.contains("SHA-256"));
        let long = zstd::encode_all(&vec![0; 1 << 22][..], 1).expect("encode");
        assert!(unpack(&long).expect_err("too long").detail.contains("bytes instead of"));
    }

    #[test]
    fn equal_seeds_give_equal_batches_and_each_pass_visits_an_image_once() {
        let mut one = Batches::new(100, 30, 7);
        let mut other = Batches::new(100, 30, 7);
        let mut different = Batches::new(100, 30, 8);
        let mut differs = false;
        for _ in 0..5 {
            let mut visited = [false; 100];
            for _ in 0..3 {
                let batch = one.next().to_vec();
                assert_eq!(batch, other.next());
                differs |= batch != different.next();
                for place in batch {
                    assert!(!std::mem::replace(&mut visited[place], true), "image {place} twice in one pass");
                }
            }
        }
        assert!(differs, "another seed gave the same batches");
    }

    #[test]
    fn the_generator_and_the_shuffle_give_what_they_always_gave() {
        assert_eq!(Pcg64::seed_from_u64(42).next_u64(), 4_178_418_447_715_145_737);
        let mut places: Vec<usize> = (0..10).collect();
        shuffle(&mut places, &mut Pcg64::seed_from_u64(42));
        assert_eq!(places, [7, 8, 4, 0, 1, 5, 3, 6, 9, 2]);
    }

    #[test]
    fn ranks_share_the_batches_and_those_that_come_later_have_others() {
        let mut all = Batches::new(Split::TRAIN_IMAGES, BATCH, 42);
        let mut samples: Vec<Samples> = (0..8).map(|rank| Samples::new(rank, 4, 42)).collect();
        for _ in 0..50 {
            let parts: Vec<Vec<usize>> = samples.iter_mut().map(|of_rank| of_rank.next().to_vec()).collect();
            assert_eq!(parts[..4].concat(), all.next());
            assert_ne!(parts[..4].concat(), parts[4..].concat());
        }
    }

    #[test]
    fn shares_cover_a_batch_evenly() {
        for world in 1..=64 {
            let shares: Vec<_> = (0..world).map(|rank| share(64, rank, world)).collect();
            assert_eq!(shares[0].start, 0);
            assert_eq!(shares[world - 1].end, 64);
            assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert!(shares.iter().all(|share| share.len() == 64 / world || share.len() == 64usize.div_ceil(world)));
        }
    }
}
