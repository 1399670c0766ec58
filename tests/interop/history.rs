//! What the workers held, and when.

/// One hold: from when its holder knew of it until just before it sent the release, on the machine's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Hold {
    pub start: u64,
    pub end: u64,
    /// Which worker held it.
    pub by: usize,
}

/// What the holds of a lock say about it.
#[derive(Debug, PartialEq, Eq)]
pub struct Verdict {
    pub holds: usize,
    /// Holds that began before all that began earlier had ended.
    pub overlaps: usize,
    /// How often the lock went from one worker to another.
    pub handovers: usize,
    /// The longest hold, in ns.
    pub longest: u64,
}

pub fn judge(mut holds: Vec<Hold>) -> Verdict {
    holds.sort_unstable();
    let (mut overlaps, mut ended) = (0, 0);
    for hold in &holds {
        assert!(hold.start <= hold.end, "{hold:?} ends before it begins");
        overlaps += usize::from(hold.start < ended);
        ended = ended.max(hold.end);
    }
    Verdict {
        holds: holds.len(),
        overlaps,
        handovers: holds.windows(2).filter(|two| two[0].by != two[1].by).count(),
        longest: holds.iter().map(|hold| hold.end - hold.start).max().unwrap_or(0),
    }
}

#[test]
fn overlaps_are_counted() {
    let verdict = |holds: &[(u64, u64, usize)]| {
        let verdict = judge(holds.iter().map(|&(start, end, by)| Hold { start, end, by }).collect());
        (verdict.overlaps, verdict.handovers)
    };
    assert_eq!(verdict(&[]), (0, 0));
    assert_eq!(verdict(&[(1, 2, 0), (2, 3, 0), (4, 5, 1), (6, 7, 0)]), (0, 2));
    // in any order, and by the same worker
    assert_eq!(verdict(&[(3, 5, 0), (1, 4, 1)]), (1, 1));
    assert_eq!(verdict(&[(1, 4, 0), (3, 5, 0)]), (1, 0));
    // a long one over several short ones
    assert_eq!(verdict(&[(1, 10, 0), (2, 3, 1), (4, 5, 1), (11, 12, 1)]), (2, 1));
    assert_eq!(judge(vec![Hold { start: 1, end: 10, by: 0 }]).longest, 9);
}

#[test]
#[should_panic(expected = "ends before it begins")]
fn a_hold_that_ends_first_is_refused() {
    judge(vec![Hold { start: 2, end: 1, by: 0 }]);
}
