//! Runs a scenario in thousands of schedules, and checks that it has met the cases that it is meant
//! for.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use shuttle::{
    Config, MaxSteps, Runner,
    scheduler::{PctScheduler, RandomScheduler, Scheduler},
};

use crate::store::tests::stopped;

/// Preemptions per run, with the scheduler that preempts rarely.
const DEPTH: usize = 3;
/// Steps per run: a run that takes more waits for an event that never comes.
const LONGEST: usize = 50_000;

/// How often each event happened, in all runs.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seen(Arc<Mutex<BTreeMap<&'static str, usize>>>);

impl Seen {
    pub(crate) fn note(&self, what: &'static str) {
        *self
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .entry(what)
            .or_default() += 1;
    }

    fn times(&self, what: &str) -> usize {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(what)
            .copied()
            .unwrap_or(0)
    }
}

/// Reports in which run a scenario failed.
struct Report<'a>(&'a Seen);

impl Drop for Report<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed in run {}", self.0.times("run"));
        }
    }
}

/// Runs a scenario in `orders` random schedules, and in as many where tasks are rarely preempted. A
/// run fails if it deadlocks. The test also fails if any of `must_see` was seen no more often than
/// once in 100 runs: it would then prove little.
///
/// `NESTLOCK_SHUTTLE=20` runs 20 times as many.
pub(crate) fn explore(
    orders: usize,
    must_see: &[&'static str],
    scenario: impl Fn(&Seen) + Send + Sync + 'static,
) {
    let factor: usize =
        std::env::var("NESTLOCK_SHUTTLE").map_or(1, |factor| factor.parse().expect("a number"));
    let (orders, seen) = (orders * factor, Seen::default());
    let (scenario, noted) = (Arc::new(scenario), seen.clone());
    let _report = Report(&seen);
    // timers need a runtime; in this one they never fire
    let runtime = stopped();
    let _context = runtime.enter();
    let run = move |scheduler: Box<dyn Scheduler + Send>| {
        let mut config = Config::new();
        (config.stack_size, config.silence_warnings) = (1 << 18, true);
        config.max_steps = MaxSteps::FailAfter(LONGEST);
        let (scenario, noted) = (Arc::clone(&scenario), noted.clone());
        Runner::new(scheduler, config).run(move || {
            noted.note("run");
            scenario(&noted);
        })
    };
    let ran = run(Box::new(RandomScheduler::new(orders)))
        + run(Box::new(PctScheduler::new(DEPTH, orders)));
    assert!(
        ran == 2 * orders && seen.times("run") == ran && ran > 0,
        "{ran} runs: {seen:?}"
    );
    for what in must_see {
        assert!(
            seen.times(what) > ran / 100,
            "too few runs have met {what:?}: {seen:?}"
        );
    }
}

/// Yields a random number of times, below `most`: the scheduler decides which tasks run in between.
pub(crate) async fn moments(most: usize) {
    use shuttle::rand::Rng;
    for _ in 0..shuttle::rand::thread_rng().gen_range(0..most) {
        shuttle::future::yield_now().await;
    }
}
