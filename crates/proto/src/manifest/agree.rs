//! Compares the manifests of all ranks, and says which ranks declared what when they differ.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec;
use alloc::vec::Vec;
use core::fmt::Write;

use super::{Declaration, Manifest};
use crate::dtype::Collective;
use crate::fault::{Fault, FaultKind};
use crate::frame::payload_crc;
use crate::ids::Rank;

/// Most values, and most runs of ranks for one value, that a fault lists.
const LISTED_MAX: usize = 4;

/// What all ranks declared, in rank 0's order and with rank 0's priorities. `manifests[r]` is rank r's; there is one
/// per rank of the job.
///
/// Takes time in proportion to the declarations where ranks declared in the same order, and a logarithm more where
/// they did not.
///
/// # Errors
/// The first difference in rank 0's order, the same on every rank: a fault of kind `DeclarationMismatch`,
/// `ShapeMismatch`, `DTypeMismatch` or `OperationMismatch` that names the tensor, the values, and the ranks that
/// have each; its `rank` is the one that differs from all others, where there is exactly one. `InvalidArgument` for a
/// broadcast from a rank that the job does not have.
pub fn agree(manifests: &[Manifest]) -> Result<Vec<Declaration>, Fault> {
    let Some((first, others)) = manifests.split_first() else { return Ok(Vec::new()) };
    let mut lookup = Lookup { first: &first.tensors, by_name: None };
    match others.iter().filter_map(|other| lookup.first_difference(&other.tensors)).min() {
        Some(index) => Err(explain(manifests, &first.tensors[index].name)),
        None => match others.iter().find_map(|other| lookup.first_unknown(&other.tensors)) {
            Some(name) => Err(explain(manifests, name)),
            None => check_roots(&first.tensors, manifests.len()).map(|()| first.tensors.clone()),
        },
    }
}

/// Finds another rank's tensors among rank 0's.
struct Lookup<'a> {
    first: &'a [Declaration],
    /// Made when the first rank with another order comes up. The checksum stands before the name because comparing
    /// it touches no memory but the tree's own; equal checksums only cost time.
    by_name: Option<BTreeMap<(u32, &'a str), usize>>,
}

impl<'a> Lookup<'a> {
    /// The index in `first` of the tensor with this name. `guess` is where it is when the order is the same.
    fn find(&mut self, name: &str, guess: usize) -> Option<usize> {
        let first = self.first;
        if first.get(guess).is_some_and(|tensor| tensor.name == name) {
            return Some(guess);
        }
        let by_name = self.by_name.get_or_insert_with(|| {
            first.iter().enumerate().map(|(index, tensor)| (key(&tensor.name), index)).collect()
        });
        by_name.get(&key(name)).copied()
    }

    /// The lowest index in `first` of a tensor that `other` lacks or declares differently.
    fn first_difference(&mut self, other: &[Declaration]) -> Option<usize> {
        let mut missing = vec![true; self.first.len()];
        let mut differing = None;
        let mut guess = 0;
        for theirs in other {
            let Some(index) = self.find(&theirs.name, guess) else { continue };
            guess = index + 1;
            missing[index] = false;
            if Difference::between(&self.first[index], theirs).is_some()
                && differing.is_none_or(|lowest| index < lowest)
            {
                differing = Some(index);
            }
        }
        let missing = missing.iter().position(|missing| *missing);
        missing.into_iter().chain(differing).min()
    }

    /// The first tensor of `other` that `first` does not have.
    fn first_unknown<'b>(&mut self, other: &'b [Declaration]) -> Option<&'b str> {
        let unknown = other.iter().enumerate().find(|(guess, theirs)| self.find(&theirs.name, *guess).is_none());
        unknown.map(|(_, theirs)| theirs.name.as_str())
    }
}

fn key(name: &str) -> (u32, &str) {
    (payload_crc(name.as_bytes()), name)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Difference {
    Shape,
    DType,
    Operation,
}

impl Difference {
    fn between(a: &Declaration, b: &Declaration) -> Option<Self> {
        if a.shape != b.shape {
            Some(Self::Shape)
        } else if a.dtype != b.dtype {
            Some(Self::DType)
        } else if (a.collective, a.reduce, a.wire) != (b.collective, b.reduce, b.wire) {
            Some(Self::Operation)
        } else {
            None
        }
    }

    fn value(self, declaration: &Declaration) -> String {
        match self {
            Self::Shape => format!("{:?}", declaration.shape),
            Self::DType => declaration.dtype.to_string(),
            Self::Operation => {
                let Declaration { collective, reduce, wire, .. } = declaration;
                format!("{collective} ({reduce}, {wire} on the wire)")
            }
        }
    }

    fn kind_and_remedy(self) -> (FaultKind, &'static str) {
        match self {
            Self::Shape => (FaultKind::ShapeMismatch, "declare the same shape on every rank"),
            Self::DType => (FaultKind::DTypeMismatch, "declare the same element type on every rank"),
            Self::Operation => {
                (FaultKind::OperationMismatch, "declare the same collective, reduction and wire format on every rank")
            }
        }
    }
}

/// The fault for a tensor that some ranks declared differently or not at all.
fn explain(manifests: &[Manifest], name: &str) -> Fault {
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for (rank, manifest) in (0..).map(Rank).zip(manifests) {
        match manifest.tensors.iter().find(|tensor| tensor.name == name) {
            Some(declaration) => with.push((rank, declaration)),
            None => without.push(rank),
        }
    }
    let (kind, detail, groups) = if without.is_empty() { differing(&with) } else { lacking(&with, without) };
    let fault = Fault::new(kind, detail).tensor(name);
    match odd_one_out(&groups) {
        Some(rank) => fault.at(rank),
        None => fault,
    }
}

type Explanation = (FaultKind, String, Vec<Vec<Rank>>);

fn lacking(with: &[(Rank, &Declaration)], without: Vec<Rank>) -> Explanation {
    let with: Vec<Rank> = with.iter().map(|(rank, _)| *rank).collect();
    let detail = format!(
        "declared by {} but not by {}: declare the same tensors, under the same names, on every rank",
        list(&with),
        list(&without)
    );
    (FaultKind::DeclarationMismatch, detail, vec![with, without])
}

fn differing(declarations: &[(Rank, &Declaration)]) -> Explanation {
    let pairs = declarations.iter().skip(1).filter_map(|(_, other)| Difference::between(declarations[0].1, other));
    // There is one: only tensors with a difference to rank 0's get here.
    let difference = pairs.min().unwrap_or(Difference::Operation);
    let mut by_value: BTreeMap<String, Vec<Rank>> = BTreeMap::new();
    for (rank, declaration) in declarations {
        by_value.entry(difference.value(declaration)).or_default().push(*rank);
    }
    let mut groups: Vec<(String, Vec<Rank>)> = by_value.into_iter().collect();
    // The fewest first: most likely they are the ones to look at.
    groups.sort_by_key(|(_, ranks)| (ranks.len(), ranks.first().copied()));
    let mut detail = String::from("declared");
    for (position, (value, ranks)) in groups.iter().take(LISTED_MAX).enumerate() {
        let joint = ["", " but", ", and"][position.min(2)];
        let _ = write!(detail, "{joint} as {value} by {}", list(ranks));
    }
    if groups.len() > LISTED_MAX {
        let _ = write!(detail, " and in {} more ways by others", groups.len() - LISTED_MAX);
    }
    let (kind, remedy) = difference.kind_and_remedy();
    let _ = write!(detail, ": {remedy}");
    (kind, detail, groups.into_iter().map(|(_, ranks)| ranks).collect())
}

/// The rank that stands alone against two or more that agree.
fn odd_one_out(groups: &[Vec<Rank>]) -> Option<Rank> {
    match groups {
        [a, b] if a.len() == 1 && b.len() > 1 => a.first().copied(),
        [a, b] if b.len() == 1 && a.len() > 1 => b.first().copied(),
        _ => None,
    }
}

/// Ascending ranks in words: "rank 1", "ranks 0 and 2", "ranks 0 to 3, 5 and 7".
fn list(ranks: &[Rank]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for Rank(rank) in ranks {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == *rank => *last = *rank,
            _ => runs.push((*rank, *rank)),
        }
    }
    let mut words: Vec<String> = Vec::new();
    for &(from, to) in runs.iter().take(LISTED_MAX) {
        match to - from {
            0 => words.push(from.to_string()),
            1 => words.extend([from.to_string(), to.to_string()]),
            _ => words.push(format!("{from} to {to}")),
        }
    }
    let left_out: u32 = runs.iter().skip(LISTED_MAX).map(|(from, to)| to - from + 1).sum();
    if left_out > 0 {
        words.push(format!("{left_out} more"));
    }
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    match words.split_last() {
        Some((last, [])) => format!("{noun} {last}"),
        Some((last, front)) => format!("{noun} {} and {last}", front.join(", ")),
        None => String::from("no rank"),
    }
}

fn check_roots(declarations: &[Declaration], world_size: usize) -> Result<(), Fault> {
    for declaration in declarations {
        if let Collective::Broadcast { root } = declaration.collective
            && root.index() >= world_size
        {
            let what = format!(
                "declared as a broadcast from {root} in a job of {world_size} ranks: choose a root below {world_size}"
            );
            return Err(Fault::new(FaultKind::InvalidArgument, what).tensor(declaration.name.as_str()));
        }
    }
    Ok(())
}
