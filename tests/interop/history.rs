//! The holds of the workers, and when they were.

/// One hold, on the machine's clock: from when its holder learned of it until just before it sent the release.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Hold {
    pub start: u64,
    pub end: u64,
    /// Which worker held it.
    pub by: usize,
    /// Whether others that share it may hold it at the same time.
    pub shared: bool,
    /// The fencing token, where there is one.
    pub token: Option<u64>,
}

/// The verdict on the holds of a lock.
#[derive(Debug, PartialEq, Eq)]
pub struct Verdict {
    pub holds: usize,
    /// Holds that are not shared.
    pub alone: usize,
    /// Holds that began before all that began earlier had ended, one of them not shared.
    pub overlaps: usize,
    /// Shared holds that began during a shared hold of another worker.
    pub together: usize,
    /// Tokens that are not higher than the one before.
    pub stale: usize,
    /// How often the lock went from one worker to another.
    pub handovers: usize,
    /// The longest hold, in ns.
    pub longest: u64,
}

pub fn judge(mut holds: Vec<Hold>) -> Verdict {
    holds.sort_unstable();
    // the end of the latest unshared hold, the end of the latest of all holds, and the worker of that one
    let (mut alone_until, mut all_until, mut last) = (0, 0, None);
    let (mut overlaps, mut together) = (0, 0);
    for hold in &holds {
        assert!(hold.start <= hold.end, "{hold:?} ends before it begins");
        overlaps += usize::from(hold.start < if hold.shared { alone_until } else { all_until });
        together += usize::from(
            hold.shared && (alone_until..all_until).contains(&hold.start) && last != Some(hold.by),
        );
        if !hold.shared {
            alone_until = alone_until.max(hold.end);
        }
        if hold.end > all_until {
            (all_until, last) = (hold.end, Some(hold.by));
        }
    }
    let tokens: Vec<u64> = holds.iter().filter_map(|hold| hold.token).collect();
    Verdict {
        holds: holds.len(),
        alone: holds.iter().filter(|hold| !hold.shared).count(),
        overlaps,
        together,
        stale: tokens.windows(2).filter(|two| two[1] <= two[0]).count(),
        handovers: holds
            .windows(2)
            .filter(|two| two[0].by != two[1].by)
            .count(),
        longest: holds
            .iter()
            .map(|hold| hold.end - hold.start)
            .max()
            .unwrap_or(0),
    }
}

#[cfg(test)]
fn alone(start: u64, end: u64, by: usize) -> Hold {
    Hold {
        start,
        end,
        by,
        shared: false,
        token: None,
    }
}

#[test]
fn overlaps_are_counted() {
    let verdict = |holds: &[(u64, u64, usize)]| {
        let verdict = judge(
            holds
                .iter()
                .map(|&(start, end, by)| alone(start, end, by))
                .collect(),
        );
        (verdict.overlaps, verdict.handovers)
    };
    assert_eq!(verdict(&[]), (0, 0));
    assert_eq!(
        verdict(&[(1, 2, 0), (2, 3, 0), (4, 5, 1), (6, 7, 0)]),
        (0, 2)
    );
    // in any order, and by the same worker
    assert_eq!(verdict(&[(3, 5, 0), (1, 4, 1)]), (1, 1));
    assert_eq!(verdict(&[(1, 4, 0), (3, 5, 0)]), (1, 0));
    // a long hold that overlaps several short ones
    assert_eq!(
        verdict(&[(1, 10, 0), (2, 3, 1), (4, 5, 1), (11, 12, 1)]),
        (2, 1)
    );
    assert_eq!(judge(vec![alone(1, 10, 0)]).longest, 9);
}

#[test]
fn shared_holds_overlap_only_those_that_are_not() {
    let verdict = |holds: &[(u64, u64, usize, bool)]| {
        let hold = |&(start, end, by, shared)| Hold {
            shared,
            ..alone(start, end, by)
        };
        let verdict = judge(holds.iter().map(hold).collect());
        (verdict.alone, verdict.overlaps, verdict.together)
    };
    assert_eq!(
        verdict(&[(1, 4, 0, true), (2, 3, 1, true), (3, 9, 1, true)]),
        (0, 0, 2)
    );
    assert_eq!(verdict(&[(1, 4, 0, true), (5, 6, 1, true)]), (0, 0, 0));
    assert_eq!(verdict(&[(1, 4, 0, true), (2, 3, 1, false)]), (1, 1, 0));
    assert_eq!(
        verdict(&[(1, 4, 0, false), (2, 3, 1, true), (3, 5, 0, true)]),
        (1, 2, 0)
    );
}

#[test]
fn tokens_that_do_not_rise_are_counted() {
    let stale = |tokens: &[u64]| {
        let hold = |(at, &token): (usize, _)| Hold {
            token: Some(token),
            ..alone(at as u64, at as u64, 0)
        };
        judge(tokens.iter().enumerate().map(hold).collect()).stale
    };
    assert_eq!(
        (stale(&[1, 2, 7]), stale(&[1, 1, 2]), stale(&[3, 2, 4, 1])),
        (0, 1, 2)
    );
}

#[test]
#[should_panic(expected = "ends before it begins")]
fn a_hold_that_ends_first_is_refused() {
    judge(vec![alone(2, 1, 0)]);
}
