//! The send queue of the watchdog: ordered by deadline, for servers that have room in flight.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap, hash_map::Entry},
};

use nestlock_wire::clock::Instant;

/// What may go out in one batch: the name of a script, and the slot that its keys share.
pub(super) type Group = (&'static str, u16);

/// Pending entries by group. Finding the next group needs no scan of all groups: in a cluster, each
/// lock may be a group.
pub(super) struct Pending<T> {
    /// Sorted by deadline, the most urgent last.
    groups: HashMap<Group, Vec<(Instant, T)>>,
    /// Per server, the earliest deadline of each group. Outdated heap entries are skipped when
    /// popped.
    order: HashMap<u16, BinaryHeap<Reverse<(Instant, Group)>>>,
}

impl<T> Default for Pending<T> {
    fn default() -> Self {
        Self {
            groups: HashMap::new(),
            order: HashMap::new(),
        }
    }
}

impl<T> Pending<T> {
    /// Adds entries that are due. `server_of` returns the server that has a group's keys now.
    pub(super) fn add(
        &mut self,
        due: impl IntoIterator<Item = (Group, Instant, T)>,
        server_of: impl Fn(u16) -> u16,
    ) {
        let mut changed: HashMap<Group, Option<Instant>> = HashMap::new();
        for (group, deadline, one) in due {
            let of = self.groups.entry(group).or_default();
            changed
                .entry(group)
                .or_insert_with(|| of.last().map(|(before, _)| *before));
            of.push((deadline, one));
        }
        for (group, before) in changed {
            let Some(of) = self.groups.get_mut(&group) else {
                continue;
            };
            of.sort_unstable_by_key(|(deadline, _)| Reverse(*deadline));
            if let Some((first, _)) = of.last()
                && before != Some(*first)
            {
                let first = *first;
                self.line_up(server_of(group.1), first, group);
            }
        }
    }

    fn line_up(&mut self, server: u16, first: Instant, group: Group) {
        self.order
            .entry(server)
            .or_default()
            .push(Reverse((first, group)));
    }

    /// Takes the most urgent entries of one group, among groups whose server is free: up to a total
    /// `weight` of `most`, and at least one. Returns them with that server.
    pub(super) fn next(
        &mut self,
        most: usize,
        weight: impl Fn(&T) -> usize,
        server_of: impl Fn(u16) -> u16,
        is_free: impl Fn(u16) -> bool,
    ) -> Option<(u16, Vec<T>)> {
        loop {
            let heads = self.order.iter().filter(|(server, _)| is_free(**server));
            let (server, _) = heads
                .filter_map(|(server, groups)| Some((*server, groups.peek()?.0)))
                .min_by_key(|(_, first)| *first)?;
            let Entry::Occupied(mut groups) = self.order.entry(server) else {
                return None;
            };
            let popped = groups.get_mut().pop();
            if groups.get().is_empty() {
                groups.remove();
            }
            let Some(Reverse((first, group))) = popped else {
                continue;
            };
            let now_at = server_of(group.1);
            if now_at != server {
                self.line_up(now_at, first, group);
                continue;
            }
            let Entry::Occupied(mut of) = self.groups.entry(group) else {
                continue;
            };
            if of
                .get()
                .last()
                .is_none_or(|(deadline, _)| *deadline != first)
            {
                continue;
            }
            let mut total = 0;
            let fit = of.get().iter().rev().take_while(|(_, one)| {
                let is_first = total == 0;
                total += weight(one);
                is_first || total <= most
            });
            let rest = of.get().len() - fit.count();
            let batch = of.get_mut().split_off(rest);
            match of.get().last() {
                Some((first, _)) => {
                    let first = *first;
                    self.line_up(server, first, group);
                }
                None => _ = of.remove(),
            }
            return Some((server, batch.into_iter().map(|(_, one)| one).collect()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(ms: u64) -> Instant {
        Instant::NEVER - Duration::from_secs(1) + Duration::from_millis(ms)
    }

    fn pending(due: &[(Group, u64)], server_of: impl Fn(u16) -> u16) -> Pending<u64> {
        let mut pending = Pending::default();
        // One `add` per entry, as they become due.
        for (group, ms) in due {
            pending.add([(*group, at(*ms), *ms)], &server_of);
        }
        pending
    }

    #[test]
    fn the_most_urgent_of_a_group_go_first_and_each_once() {
        let server_of = |group| group / 10;
        let due = [
            (("a", 1), 5),
            (("a", 2), 3),
            (("b", 1), 4),
            (("a", 1), 1),
            (("a", 1), 7),
            (("a", 11), 2),
        ];
        let mut pending = pending(&due, server_of);
        pending.add([(("a", 2), at(6), 6), (("a", 2), at(0), 0)], server_of);
        let mut batches = Vec::new();
        while let Some(batch) = pending.next(2, |_| 1, server_of, |_| true) {
            batches.push(batch);
        }
        let wanted = [
            (0, vec![3, 0]),
            (0, vec![5, 1]),
            (1, vec![2]),
            (0, vec![4]),
            (0, vec![6]),
            (0, vec![7]),
        ];
        assert_eq!(batches, wanted);
        assert!(pending.groups.is_empty() && pending.order.is_empty());
    }

    #[test]
    fn heavy_entries_make_small_batches() {
        let mut pending = pending(&[1, 2, 3, 9, 4].map(|ms| (("a", 1), ms)), |_| 0);
        let weight = |ms: &u64| *ms as usize;
        let mut batches = Vec::new();
        while let Some((_, batch)) = pending.next(5, weight, |_| 0, |_| true) {
            batches.push(batch);
        }
        assert_eq!(batches, [vec![2, 1], vec![3], vec![4], vec![9]]);
    }

    #[test]
    fn a_server_that_has_enough_to_do_holds_up_its_own_only() {
        let server_of = |group| group;
        let mut pending = pending(&[(("a", 1), 1), (("a", 2), 2), (("a", 1), 3)], server_of);
        assert_eq!(
            pending.next(9, |_| 1, server_of, |server| server != 1),
            Some((2, vec![2]))
        );
        assert_eq!(
            pending.next(9, |_| 1, server_of, |server| server != 1),
            None
        );
        assert_eq!(
            pending.next(9, |_| 1, server_of, |_| true),
            Some((1, vec![3, 1]))
        );
    }

    #[test]
    fn what_has_moved_goes_to_its_new_server() {
        let mut pending = pending(&[(("a", 1), 1), (("a", 2), 2)], |_| 0);
        assert_eq!(pending.next(9, |_| 1, |_| 7, |server| server == 0), None);
        assert_eq!(
            pending.next(9, |_| 1, |_| 7, |server| server == 7),
            Some((7, vec![1]))
        );
        assert_eq!(
            pending.next(9, |_| 1, |_| 7, |server| server == 7),
            Some((7, vec![2]))
        );
        assert_eq!(pending.next(9, |_| 1, |_| 7, |_| true), None);
    }
}
