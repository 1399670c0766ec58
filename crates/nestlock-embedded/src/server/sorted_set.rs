//! A sorted set: members in order of their scores, then of their bytes.

use std::{
    cmp::Ordering,
    collections::{BTreeSet, HashMap},
};

/// A score, in numerical order. It is never NaN.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Score(pub(crate) f64);

impl PartialEq for Score {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Score {}

impl PartialOrd for Score {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Score {
    fn cmp(&self, other: &Self) -> Ordering {
        // not `total_cmp`, for which 0 and -0 differ
        self.0.partial_cmp(&other.0).unwrap_or(Ordering::Equal)
    }
}

#[derive(Debug, Clone, Default)]
pub(crate) struct SortedSet {
    scores: HashMap<Vec<u8>, Score>,
    order: BTreeSet<(Score, Vec<u8>)>,
}

impl SortedSet {
    pub(crate) fn len(&self) -> usize {
        self.scores.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.scores.is_empty()
    }

    pub(crate) fn score(&self, member: &[u8]) -> Option<f64> {
        self.scores.get(member).map(|score| score.0)
    }

    /// Sets the score of a member, adding the member if it is missing.
    pub(crate) fn insert(&mut self, member: &[u8], score: f64) {
        // -0 becomes 0, as in Redis's small sets
        let score = Score(score + 0.0);
        if let Some(before) = self.scores.insert(member.to_vec(), score) {
            self.order.remove(&(before, member.to_vec()));
        }
        self.order.insert((score, member.to_vec()));
    }

    pub(crate) fn remove(&mut self, member: &[u8]) -> bool {
        let Some((member, score)) = self.scores.remove_entry(member) else {
            return false;
        };
        self.order.remove(&(score, member));
        true
    }

    /// Returns the members in ascending order.
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = (&[u8], f64)> {
        self.order
            .iter()
            .map(|(score, member)| (member.as_slice(), score.0))
    }

    /// Returns how many members precede this one. Returns `None` if the set does not contain it.
    pub(crate) fn rank(&self, member: &[u8]) -> Option<usize> {
        let score = *self.scores.get(member)?;
        Some(self.order.range(..(score, member.to_vec())).count())
    }
}
