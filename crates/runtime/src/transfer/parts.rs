//! The parts of a trainer's state, as it describes and gives them.

use gradwire_proto::saved::{SavedPart, check_parts};
use gradwire_proto::{Fault, FaultKind};

use crate::state::{State, StateTensor, StateTensorMut};

/// Names and lengths of a state's parts.
///
/// # Errors
/// `InvalidArgument` for a part that is nameless, named twice, or too long.
pub(crate) fn parts_of(parts: &[StateTensor<'_>]) -> Result<Vec<SavedPart>, Fault> {
    check_parts(parts.iter().map(|part| (part.name, part.bytes.len() as u64)))?;
    Ok(parts.iter().map(|part| SavedPart { name: part.name.to_owned(), bytes: part.bytes.len() as u64 }).collect())
}

/// A state's parts to be written to, which are `parts`, those that it said it has.
///
/// # Errors
/// `InvalidArgument` that names the first part in which [`State::parts_mut`] differs from [`State::parts`].
pub(crate) fn parts_mut_of<'a>(
    state: &'a mut dyn State,
    parts: &[SavedPart],
) -> Result<Vec<StateTensorMut<'a>>, Fault> {
    let theirs = state.parts_mut();
    let wrong = |name: &str, what: String| {
        let detail = format!("part '{name}' of the state: {what}; both must give the same parts, in the same order");
        Err(Fault::new(FaultKind::InvalidArgument, detail))
    };
    for (part, to_write) in parts.iter().zip(&theirs) {
        if to_write.name != part.name {
            return wrong(&part.name, format!("State::parts_mut has '{}' in its place", to_write.name));
        }
        if to_write.bytes.len() as u64 != part.bytes {
            let what = format!(
                "it has {} bytes in State::parts_mut, but {} in State::parts",
                to_write.bytes.len(),
                part.bytes
            );
            return wrong(&part.name, what);
        }
    }
    match (parts.get(theirs.len()), theirs.get(parts.len())) {
        (Some(missing), _) => wrong(&missing.name, "State::parts has it, but State::parts_mut does not".to_owned()),
        (_, Some(odd)) => wrong(odd.name, "State::parts_mut has it, but State::parts does not".to_owned()),
        (None, None) => Ok(theirs),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What it says that it has, and what it gives to be written to.
    struct Odd(Vec<(&'static str, usize)>, Vec<(&'static str, Vec<u8>)>);

    impl State for Odd {
        fn parts(&self) -> Vec<StateTensor<'_>> {
            self.0.iter().map(|(name, length)| StateTensor { name, bytes: &[0; 64][..*length] }).collect()
        }

        fn parts_mut(&mut self) -> Vec<StateTensorMut<'_>> {
            self.1.iter_mut().map(|(name, bytes)| StateTensorMut { name, bytes }).collect()
        }
    }

    #[test]
    fn parts_to_write_to_that_are_not_those_of_the_state_are_named() {
        let said = vec![("weights", 40), ("seed", 8)];
        let of = |parts: &[(&'static str, usize)]| {
            let given = parts.iter().map(|(name, length)| (*name, vec![0; *length])).collect();
            let mut odd = Odd(said.clone(), given);
            let parts = parts_of(&odd.parts()).expect("parts");
            parts_mut_of(&mut odd, &parts).map(|parts| parts.len()).map_err(|fault| (fault.kind, fault.detail))
        };
        assert_eq!(of(&[("weights", 40), ("seed", 8)]), Ok(2));
        let refused = |given: &[(&'static str, usize)], words: &str| {
            let (kind, detail) = of(given).expect_err(words);
            assert_eq!(kind, FaultKind::InvalidArgument, "{detail}");
            assert!(detail.contains(words), "{detail}");
        };
        refused(
            &[("weights", 36), ("seed", 8)],
            "part 'weights' of the state: it has 36 bytes in State::parts_mut, but 40",
        );
        refused(&[("weights", 44), ("seed", 8)], "it has 44 bytes");
        refused(&[("weights", 40)], "part 'seed' of the state: State::parts has it, but State::parts_mut does not");
        refused(&[], "part 'weights'");
        refused(
            &[("seed", 8), ("weights", 40)],
            "part 'weights' of the state: State::parts_mut has 'seed' in its place",
        );
        refused(&[("weights", 40), ("seed", 8), ("odd", 1)], "part 'odd' of the state: State::parts_mut has it");
    }
}
