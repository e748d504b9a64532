//! Virtual time, and what is to happen in it.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// Virtual time: nanoseconds since the job began.
pub(crate) type Nanos = u64;

pub(crate) const US: Nanos = 1_000;
pub(crate) const MS: Nanos = 1_000_000;
pub(crate) const SECOND: Nanos = 1_000_000_000;

/// What is to happen, in the order of its time; at the same time, in the order in which it was planned.
#[derive(Debug)]
pub(crate) struct Queue<E> {
    heap: BinaryHeap<Reverse<Entry<E>>>,
    planned: u64,
}

#[derive(Debug)]
struct Entry<E> {
    at: Nanos,
    number: u64,
    event: E,
}

impl<E> Queue<E> {
    pub(crate) const fn new() -> Self {
        Self { heap: BinaryHeap::new(), planned: 0 }
    }

    pub(crate) fn plan(&mut self, at: Nanos, event: E) {
        self.heap.push(Reverse(Entry { at, number: self.planned, event }));
        self.planned += 1;
    }

    pub(crate) fn next(&mut self) -> Option<(Nanos, E)> {
        self.heap.pop().map(|Reverse(entry)| (entry.at, entry.event))
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<E> Eq for Entry<E> {}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_the_order_of_time_and_then_of_planning() {
        let mut queue = Queue::new();
        for (at, name) in [(5, 'a'), (3, 'b'), (5, 'c'), (0, 'd')] {
            queue.plan(at, name);
        }
        let order: String = std::iter::from_fn(|| queue.next()).map(|(_, name)| name).collect();
        assert_eq!(order, "dbac");
    }
}
