//! Which of the members that a newcomer asks gives it what.

/// The seat, among this many members that are asked, that gives a piece of the state or a unit of results.
#[must_use]
pub const fn home(index: u32, holders: u32) -> u32 {
    index % holders
}

/// The seat that keeps too what is at home at this one, and gives it where that is lost: so a newcomer goes on, and states
/// that differ show. A lone holder has none.
#[must_use]
pub const fn backup(seat: u32, holders: u32) -> Option<u32> {
    if holders > 1 { Some((seat + 1) % holders) } else { None }
}

/// Whether `seat` keeps what is at home at `home`: its own, and that of the seat whose backup it is.
#[must_use]
pub const fn stands_in(seat: u32, home: u32, holders: u32) -> bool {
    home == seat || matches!(backup(home, holders), Some(backup) if backup == seat)
}

/// Whether this seat keeps a piece or a unit: its home does, and the backup of that.
#[must_use]
pub const fn keeps(index: u32, seat: u32, holders: u32) -> bool {
    stands_in(seat, home(index, holders), holders)
}

/// Who gives what is at home at this seat: that one, or where it is lost its backup. Nothing if both are. `lives`: whether a
/// seat is not lost.
#[must_use]
pub fn giver(home: u32, holders: u32, lives: impl Fn(u32) -> bool) -> Option<u32> {
    Some(home).filter(|seat| lives(*seat)).or_else(|| backup(home, holders).filter(|seat| lives(*seat)))
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    #[test]
    fn whoever_is_lost_another_one_keeps_what_it_kept() {
        for holders in 1..7 {
            for piece in 0..20 {
                let kept: Vec<u32> = (0..holders).filter(|seat| keeps(piece, *seat, holders)).collect();
                let mut expected: Vec<u32> =
                    [Some(home(piece, holders)), backup(home(piece, holders), holders)].into_iter().flatten().collect();
                expected.sort_unstable();
                assert_eq!(kept, expected);
                assert_eq!(kept.len(), 2.min(holders as usize), "{piece} of {holders}");
            }
        }
    }

    #[test]
    fn the_home_gives_while_it_lives_and_its_backup_after_that() {
        for holders in 1..7 {
            for home in 0..holders {
                assert_eq!(giver(home, holders, |_| true), Some(home));
                assert_eq!(giver(home, holders, |seat| seat != home), backup(home, holders));
                let both = |seat| seat != home && Some(seat) != backup(home, holders);
                assert_eq!(giver(home, holders, both), None);
            }
        }
    }
}
