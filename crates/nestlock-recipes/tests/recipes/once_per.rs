//! A job runs once per tick: with clocks that differ, processes that die and futures that are
//! dropped.

use std::{
    collections::BTreeMap,
    io::Write,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use nestlock::{Error, LockClient};
use nestlock_embedded::{EmbeddedServer, SpawnedServer};
use nestlock_recipes::once_per::{Missed, OncePer, Outcome, Tick, Ticks, once_per};

use crate::support::{
    Child, OnDrop, Wire, child, client, eventually, exists, monotonic_ns, ms, poll_times,
    poll_times_and_keep, run_child, say,
};

const SOME_DAY: u64 = 1_800_000_000_000;

/// A clock that the test moves.
#[derive(Clone)]
struct Clock(Arc<AtomicU64>);

impl Clock {
    fn new() -> Self {
        Self(Arc::new(AtomicU64::new(SOME_DAY)))
    }

    fn advance(&self, by: Duration) {
        self.0.fetch_add(by.as_millis().try_into().unwrap(), SeqCst);
    }

    /// Returns this clock, ahead by this many milliseconds.
    fn ahead(&self, by: i64) -> impl Fn() -> SystemTime + Send + Sync + 'static {
        let now = Arc::clone(&self.0);
        move || UNIX_EPOCH + ms(now.load(SeqCst).checked_add_signed(by).unwrap())
    }
}

const SECOND: Duration = Duration::from_secs(1);

fn every_10_s(client: &LockClient, clock: &Clock) -> OncePer {
    once_per(client, "job", Ticks::every(10 * SECOND))
        .unwrap()
        .clock(clock.ahead(0))
}

/// The runs of each tick, and how many jobs run now.
#[derive(Default)]
struct Books {
    ticks: Mutex<BTreeMap<u64, Work>>,
    inside: AtomicU32,
}

#[derive(Debug, Default, Clone, Copy)]
struct Work {
    begun: u32,
    ended: u32,
}

impl Books {
    fn tick(&self, tick: Tick, change: impl FnOnce(&mut Work)) {
        change(self.ticks.lock().unwrap().entry(tick.number()).or_default());
    }
}

struct Figures {
    looks: u32,
    killed_outside: u32,
    killed_at_work: u32,
}

/// Runs 10,000 ticks in virtual time: five replicas whose clocks are 3 s apart check at
/// random, sometimes two at the same time, and about one check in 50 dies with its process. Jobs
/// take time, too.
async fn ten_thousand_ticks(marks_before: bool) -> (BTreeMap<u64, Work>, Figures) {
    let (server, clock) = (EmbeddedServer::start().unwrap(), Clock::new());
    let mut replicas = Vec::new();
    for number in 0..5 {
        let job =
            every_10_s(&client(server.url()).await, &clock).clock(clock.ahead(3000 * (number - 2)));
        let job = job.missed(Missed::All(u32::MAX));
        replicas.push(if marks_before {
            job.before()
        } else {
            job.after()
        });
    }
    let books = Arc::new(Books::default());
    let pass = |by: Duration| {
        clock.advance(by);
        server.advance(by);
    };
    let mut figures = Figures {
        looks: 0,
        killed_outside: 0,
        killed_at_work: 0,
    };
    let mut rng = fastrand::Rng::with_seed(13);
    let end = SOME_DAY + 10_000 * 10_000;
    while clock.0.load(SeqCst) < end {
        pass(ms(rng.u64(3_000..14_000)));
        let both = rng.u32(0..4) == 0;
        let two = [0, 1].map(|_| {
            let (job, kill, work) = (
                replicas[rng.usize(0..5)].clone(),
                rng.u32(0..25) == 0,
                ms(rng.u64(0..2_500)),
            );
            (job, if kill { rng.u32(1..14) } else { u32::MAX }, work)
        });
        figures.looks += 1 + u32::from(both);
        let [first, second] = two.map(|(job, polls, work)| {
            let (books, pass) = (Arc::clone(&books), &pass);
            async move {
                let at_work = AtomicU32::new(0);
                let (books_of_job, at_work_of_job) = (Arc::clone(&books), &at_work);
                // until nothing is due, as a replica does
                let mut looks = Box::pin(async move {
                    loop {
                        let outcome = job.run(|tick| {
                            let books = &books_of_job;
                            async move {
                                books.tick(tick, |work| work.begun += 1);
                                assert_eq!(books.inside.fetch_add(1, SeqCst), 0, "two at a time");
                                at_work_of_job.store(1, SeqCst);
                                tokio::task::yield_now().await;
                                pass(work);
                                tokio::task::yield_now().await;
                                at_work_of_job.store(0, SeqCst);
                                books.inside.fetch_sub(1, SeqCst);
                                books.tick(tick, |work| work.ended += 1);
                            }
                        });
                        if !matches!(outcome.await.unwrap(), Outcome::Ran(())) {
                            return;
                        }
                    }
                });
                let dead = poll_times_and_keep(&mut looks, polls).await.is_none();
                if dead {
                    // never polled or dropped again, so its lock stays for the lease
                    std::mem::forget(looks);
                    books.inside.fetch_sub(at_work.load(SeqCst), SeqCst);
                }
                (dead, at_work.load(SeqCst))
            }
        });
        let ends = if both {
            vec![tokio::join!(first, second)]
        } else {
            vec![(first.await, (false, 0))]
        };
        for (dead, at_work) in ends.into_iter().flat_map(|(one, other)| [one, other]) {
            figures.killed_at_work += u32::from(dead) * at_work;
            figures.killed_outside += u32::from(dead) * (1 - at_work);
        }
    }
    // the ticks that dead replicas left
    for _ in 0..3 {
        pass(20 * SECOND);
        let look = |tick| {
            let books = &books;
            async move {
                books.tick(tick, |work| {
                    *work = Work {
                        begun: work.begun + 1,
                        ended: work.ended + 1,
                    }
                });
            }
        };
        while matches!(replicas[4].run(look).await.unwrap(), Outcome::Ran(())) {}
    }
    let ticks = books.ticks.lock().unwrap().clone();
    (ticks, figures)
}

/// Returns all ticks from the first to the last.
fn grid(ticks: &BTreeMap<u64, Work>) -> Vec<Work> {
    let (first, last) = (*ticks.keys().next().unwrap(), *ticks.keys().last().unwrap());
    let grid = (first..=last)
        .step_by(10_000)
        .map(|tick| ticks.get(&tick).copied().unwrap_or_default());
    let grid: Vec<Work> = grid.collect();
    assert!(grid.len() >= 10_000, "{} ticks", grid.len());
    grid
}

/// When 10,000 ticks are marked after their runs, each one runs at least once and never twice at a
/// time.
#[tokio::test]
async fn ten_thousand_ticks_marked_after_all_run_and_never_overlap() {
    let (
        ticks,
        Figures {
            looks,
            killed_outside,
            killed_at_work,
        },
    ) = ten_thousand_ticks(false).await;
    let grid = grid(&ticks);
    let (never, again) = (
        grid.iter().filter(|work| work.ended == 0).count(),
        grid.iter()
            .map(|work| work.ended.saturating_sub(1))
            .sum::<u32>(),
    );
    let cut_off: u32 = grid.iter().map(|work| work.begun - work.ended).sum();
    println!(
        "after: {} ticks, {looks} looks, {} kills, {killed_at_work} of them at work; never run: {never}, run again after an end: {again}, two at a time: 0",
        grid.len(),
        killed_outside + killed_at_work,
    );
    assert_eq!((never, cut_off), (0, killed_at_work));
    // those that died between the end of a job and its mark
    assert!(again <= killed_outside, "{again} of {killed_outside}");
    assert!(killed_at_work > 10 && killed_outside > 10);
}

#[tokio::test]
async fn marked_before_each_of_ten_thousand_ticks_runs_at_most_once() {
    let (
        ticks,
        Figures {
            looks,
            killed_outside,
            killed_at_work,
        },
    ) = ten_thousand_ticks(true).await;
    let grid = grid(&ticks);
    let (again, never) = (
        grid.iter().filter(|work| work.begun > 1).count(),
        grid.iter().filter(|work| work.begun == 0).count(),
    );
    let cut_off: u32 = grid.iter().map(|work| work.begun - work.ended).sum();
    println!(
        "before: {} ticks, {looks} looks, {} kills, {killed_at_work} of them at work; run twice: {again}, never run: {never}",
        grid.len(),
        killed_outside + killed_at_work,
    );
    assert_eq!((again, cut_off), (0, killed_at_work));
    // those that died between the mark and the start of the job
    assert!(
        u32::try_from(never).unwrap() <= killed_outside,
        "{never} of {killed_outside}"
    );
    assert!(killed_at_work > 10 && killed_outside > 10);
}

/// A line that a replica process writes: `begin` or `end`, process, tick, nanoseconds.
#[derive(Debug, Clone)]
struct Line {
    begins: bool,
    process: String,
    tick: u64,
    at: u64,
}

#[test]
fn a_replica_process() {
    let Some(words) = child() else { return };
    let [url, path, ahead, mark] = &words[..] else {
        panic!("{words:?}")
    };
    let ahead = ms(ahead.parse().unwrap());
    run_child(async move {
        let job = once_per(&client(url).await, "job", Ticks::every(ms(500))).unwrap();
        let job = job
            .clock(move || SystemTime::now() + ahead)
            .lease(ms(3_000))
            .missed(Missed::All(1_000));
        let job = if mark == "before" {
            job.before()
        } else {
            job.after()
        };
        let file = Mutex::new(std::fs::OpenOptions::new().append(true).open(path).unwrap());
        let write = |what: &str, tick: Tick| {
            let line = format!(
                "{what} {} {} {}\n",
                std::process::id(),
                tick.number(),
                monotonic_ns()
            );
            file.lock().unwrap().write_all(line.as_bytes()).unwrap();
        };
        say("ready");
        let ended = job.run_forever(|tick| {
            let write = &write;
            async move {
                write("begin", tick);
                tokio::time::sleep(ms(tick.number() / 500 % 4 * 50)).await;
                write("end", tick);
            }
        });
        panic!("{}", ended.await);
    });
}

/// Runs five processes whose clocks are 3 s apart, and kills one now and then. Returns the
/// lines that they wrote, in which killed jobs have no end, and when each was killed.
fn replicas_that_are_killed(mark: &str) -> (Vec<Line>, BTreeMap<String, u64>) {
    let (server, folder) = (
        SpawnedServer::start().unwrap(),
        tempfile::tempdir().unwrap(),
    );
    let path = folder.path().join("ticks");
    std::fs::write(&path, "").unwrap();
    let start = |number: usize| {
        let words = [
            &server.url(),
            path.to_str().unwrap(),
            &(3000 * number).to_string(),
            mark,
        ];
        let child = Child::start("once_per::a_replica_process", &words);
        assert_eq!(child.line(), "ready");
        child
    };
    let lines = || {
        let text = std::fs::read_to_string(&path).unwrap();
        let line = |line: &str| {
            let words: Vec<&str> = line.split(' ').collect();
            let [what, process, tick, at] = words[..] else {
                panic!("{line:?}")
            };
            Line {
                begins: what == "begin",
                process: process.into(),
                tick: tick.parse().unwrap(),
                at: at.parse().unwrap(),
            }
        };
        text.lines().map(line).collect::<Vec<Line>>()
    };
    let (mut replicas, mut killed): (Vec<Child>, _) =
        ((0..5).map(start).collect(), BTreeMap::new());
    for round in 0..6 {
        // kill the process that started a job last, in the middle of that job if possible
        let (seen, patience) = (lines().len(), Instant::now());
        let at_work = loop {
            let now = lines();
            if let Some(last) = now
                .last()
                .filter(|last| last.begins && now.len() > seen + 2)
            {
                break last.process.clone();
            }
            assert!(
                patience.elapsed() < Duration::from_secs(60),
                "no job begins in round {round}"
            );
            std::thread::sleep(ms(1));
        };
        let number = replicas
            .iter()
            .position(|replica| replica.pid().to_string() == at_work)
            .unwrap();
        replicas[number].kill();
        killed.insert(at_work, monotonic_ns());
        replicas[number] = start(number);
    }
    let (seen, patience) = (lines().len(), Instant::now());
    while lines().len() < seen + 6 {
        assert!(
            patience.elapsed() < Duration::from_secs(60),
            "no replica goes on"
        );
        std::thread::sleep(ms(5));
    }
    drop(replicas);
    (lines(), killed)
}

/// Processes that are killed run each tick at least once, and never two at a time.
#[test]
fn killed_processes_run_ticks_at_least_once_and_never_overlap() {
    let (lines, killed) = replicas_that_are_killed("after");
    let mut ended: BTreeMap<u64, u32> = BTreeMap::new();
    let mut at_work: Option<Line> = None;
    let mut cut_off = 0;
    for line in &lines {
        if line.begins {
            // a job without an end belongs to a process that was killed
            if let Some(before) = at_work.replace(line.clone()) {
                let end = killed
                    .get(&before.process)
                    .unwrap_or_else(|| panic!("{before:?} and {line:?}"));
                assert!(
                    *end <= line.at,
                    "{before:?} was killed at {end}, after {line:?}"
                );
                cut_off += 1;
            }
        } else {
            assert_eq!(at_work.take().unwrap().process, line.process);
            *ended.entry(line.tick).or_default() += 1;
        }
    }
    let (first, last) = (*ended.keys().next().unwrap(), *ended.keys().last().unwrap());
    let missing: Vec<u64> = (first..=last)
        .step_by(500)
        .filter(|tick| !ended.contains_key(tick))
        .collect();
    println!(
        "after: {} ticks by processes, {} kills, {cut_off} of them at work; never run: {}",
        ended.len(),
        killed.len(),
        missing.len()
    );
    assert!(missing.is_empty(), "{missing:?} of {ended:?}");
    assert!(cut_off > 0);
}

/// Processes that are killed run each tick at most once if it is marked before the run.
#[test]
fn killed_processes_run_each_tick_marked_before_at_most_once() {
    let (lines, killed) = replicas_that_are_killed("before");
    let mut begun: BTreeMap<u64, u32> = BTreeMap::new();
    for line in lines.iter().filter(|line| line.begins) {
        *begun.entry(line.tick).or_default() += 1;
    }
    println!(
        "before: {} ticks by processes, {} kills",
        begun.len(),
        killed.len()
    );
    assert!(begun.values().all(|times| *times == 1), "{begun:?}");
}

/// A run is dropped at any poll: if its tick is not marked yet, another replica runs it at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_run_leaves_the_lock_free_and_the_tick_run_or_not() {
    let (server, clock) = (EmbeddedServer::start().unwrap(), Clock::new());
    let (a, b) = (client(server.url()).await, client(server.url()).await);
    for marks_before in [false, true] {
        let [job, other] = [&a, &b].map(|client| {
            let job = every_10_s(client, &clock);
            if marks_before {
                job.before()
            } else {
                job.after()
            }
        });
        let (mut k, mut ends) = (1, 0);
        while ends < 4 {
            assert!(k < 100, "it never ends");
            clock.advance(10 * SECOND);
            let (begun, done) = (AtomicU32::new(0), AtomicU32::new(0));
            let work = |_| async {
                // the job is dropped before the lock is released
                let _held = OnDrop(|| assert!(exists(server.addr(), "job")));
                begun.fetch_add(1, SeqCst);
                tokio::task::yield_now().await;
                done.fetch_add(1, SeqCst);
            };
            let outcome = poll_times(job.run(work), k).await;
            if let Some(outcome) = outcome {
                assert_eq!(outcome.unwrap(), Outcome::Ran(()));
                ends += 1;
            }
            a.idle().await;
            assert!(!exists(server.addr(), "job"), "{k} polls: still held");
            let first = (begun.load(SeqCst), done.load(SeqCst));
            let second = other.run(work).await.unwrap();
            let both = (begun.load(SeqCst), done.load(SeqCst));
            match second {
                // the tick was not marked
                Outcome::Ran(()) if marks_before => {
                    assert_eq!((first, both), ((0, 0), (1, 1)), "{k} polls");
                }
                Outcome::Ran(()) => assert_eq!(both.1, first.1 + 1, "{k} polls"),
                Outcome::AlreadyDone if marks_before => assert!(both.0 <= 1, "{k} polls"),
                Outcome::AlreadyDone => assert_eq!(both, (1, 1), "{k} polls"),
                other => panic!("{k} polls: {other:?}"),
            }
            k += 1;
        }
        assert_eq!((a.stats().holds, a.stats().settling), (0, 0));
    }
}

/// A replica is cut off before it can write its mark, and its lease has ended when it can: the job
/// does not start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_mark_begins_no_job() {
    let (server, clock) = (EmbeddedServer::start().unwrap(), Clock::new());
    let wire = Wire::to(server.addr()).await;
    let (a, b) = (client(wire.url()).await, client(server.url()).await);
    let [job, other] = [&a, &b].map(|client| every_10_s(client, &clock).before().lease(ms(200)));
    let (mut ends, mut late, mut k) = (0, 0, 0);
    // the number of polls before the mark depends on the machine, so try all until one was right
    for _ in 0..400 {
        k += 1;
        clock.advance(10 * SECOND);
        let begun = AtomicU32::new(0);
        let work = |_| async { begun.fetch_add(1, SeqCst) };
        let mut run = Box::pin(job.run(work));
        if poll_times_and_keep(&mut run, k).await.is_some() {
            ends += 1;
            if ends % 3 == 0 {
                if late > 0 {
                    break;
                }
                k = 0;
            }
            continue;
        }
        wire.cut();
        // the lock's record has expired, if there was one
        eventually("the other one's turn", || async {
            other.run(work).await.unwrap() != Outcome::Elsewhere
        })
        .await;
        wire.mend();
        late += u32::from(run.await.is_err_and(|error| error.is_lost()));
        // none, if the mark was written in time and its reply was lost
        assert!(begun.load(SeqCst) <= 1, "{k} polls");
        a.idle().await;
    }
    assert!(ends >= 3 && late > 0, "{ends} {late}");
}

/// Returns the ticks that this replica runs until none is due.
async fn runs(job: &OncePer) -> Vec<u64> {
    let mut ticks = Vec::new();
    loop {
        match job
            .run(|tick| async move { (tick.number() - SOME_DAY) / 10_000 })
            .await
            .unwrap()
        {
            Outcome::Ran(tick) => ticks.push(tick),
            Outcome::AlreadyDone => return ticks,
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn missed_ticks_are_skipped_or_run_as_configured() {
    let server = EmbeddedServer::start().unwrap();
    let client = client(server.url()).await;
    for (name, missed, first, later) in [
        ("skip", Missed::Skip, vec![], vec![]),
        ("latest", Missed::Latest, vec![0], vec![5]),
        ("three", Missed::All(3), vec![0], vec![3, 4, 5]),
        ("all", Missed::All(u32::MAX), vec![0], vec![1, 2, 3, 4, 5]),
        ("none", Missed::All(0), vec![0], vec![5]),
    ] {
        let clock = Clock::new();
        clock.advance(SECOND);
        let replica = || {
            once_per(&client, name, Ticks::every(10 * SECOND))
                .unwrap()
                .clock(clock.ahead(0))
                .missed(missed)
        };
        assert_eq!(runs(&replica()).await, first, "{missed:?}, a new job");
        // no replica runs for a while
        clock.advance(50 * SECOND);
        let late = replica();
        assert_eq!(runs(&late).await, later, "{missed:?}, down for five ticks");
        clock.advance(10 * SECOND);
        assert_eq!(runs(&late).await, [6], "{missed:?}, the next one");
        // a replica whose clock is behind
        let behind = replica().clock(clock.ahead(-30_000));
        assert_eq!(runs(&behind).await, [0; 0], "{missed:?}");
    }
}

#[tokio::test]
async fn at_most_cancels_the_job_and_not_the_lock_under_it() {
    let (server, clock) = (EmbeddedServer::start().unwrap(), Clock::new());
    let (a, b) = (client(server.url()).await, client(server.url()).await);
    let held = AtomicU32::new(0);
    let job = every_10_s(&a, &clock).at_most(ms(50));
    let endless = |_| async {
        let _held = OnDrop(|| held.store(u32::from(exists(server.addr(), "job")), SeqCst));
        std::future::pending::<()>().await;
    };
    assert_eq!(job.run(endless).await.unwrap(), Outcome::Cancelled);
    assert_eq!(
        held.load(SeqCst),
        1,
        "the lock was free before the job was dropped"
    );
    assert_eq!(
        every_10_s(&b, &clock).run(|_| async {}).await.unwrap(),
        Outcome::AlreadyDone
    );
    clock.advance(10 * SECOND);
    assert_eq!(job.run(|_| async { 7 }).await.unwrap(), Outcome::Ran(7));
}

#[tokio::test]
async fn a_job_whose_lock_is_lost_is_dropped_and_run_by_another() {
    for marks_before in [false, true] {
        let (server, clock) = (EmbeddedServer::start().unwrap(), Clock::new());
        let (a, b) = (client(server.url()).await, client(server.url()).await);
        let [job, other] = [&a, &b].map(|client| {
            let job = every_10_s(client, &clock).lease(ms(600));
            if marks_before { job.before() } else { job }
        });
        let lost = job.run(|_| async {
            // the next renewal notices the loss
            server.advance(SECOND);
            std::future::pending::<()>().await;
        });
        let error = lost.await.unwrap_err();
        assert!(matches!(error, Error::Lost { .. }), "{error}");
        let second = other.run(|_| async {}).await.unwrap();
        assert_eq!(
            second,
            if marks_before {
                Outcome::AlreadyDone
            } else {
                Outcome::Ran(())
            }
        );
    }
}

#[tokio::test]
async fn a_busy_job_is_not_waited_for() {
    let (server, clock) = (EmbeddedServer::start().unwrap(), Clock::new());
    let (a, b) = (client(server.url()).await, client(server.url()).await);
    let (job, other) = (every_10_s(&a, &clock), every_10_s(&b, &clock));
    let outcome = job.run(|_| async {
        assert_eq!(other.run(|_| async {}).await.unwrap(), Outcome::Elsewhere);
        // the same replica does not re-enter, either
        assert_eq!(job.run(|_| async {}).await.unwrap(), Outcome::Elsewhere);
    });
    assert_eq!(outcome.await.unwrap(), Outcome::Ran(()));
    assert_eq!(other.run(|_| async {}).await.unwrap(), Outcome::AlreadyDone);
}

/// `run_forever` survives an outage of the server, and ends when the client is shut down.
#[tokio::test]
async fn a_run_forever_outlasts_the_server_and_ends_with_the_client() {
    let server = EmbeddedServer::start().unwrap();
    let port = server.addr().port();
    let client = client(server.url()).await;
    let runs = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&runs);
    let job = once_per(&client, "job", Ticks::every(ms(20)))
        .unwrap()
        .lease(ms(300));
    let forever = tokio::spawn(async move {
        job.run_forever(|_| {
            counted.fetch_add(1, SeqCst);
            async {}
        })
        .await
    });
    eventually("some ticks", || async { runs.load(SeqCst) > 3 }).await;
    drop(server);
    tokio::time::sleep(ms(100)).await;
    let seen = runs.load(SeqCst);
    let _server = EmbeddedServer::start_on(port).unwrap();
    eventually("ticks after the outage", || async {
        runs.load(SeqCst) > seen + 3
    })
    .await;
    client.shutdown().await.unwrap();
    let ended = forever.await.unwrap();
    assert!(matches!(ended, Error::Closed), "{ended}");
}

fn is_send<T: Send>(_: &T) {}

#[tokio::test]
async fn its_futures_may_be_spawned() {
    let server = EmbeddedServer::start().unwrap();
    let job = once_per(&client(server.url()).await, "job", Ticks::every(SECOND)).unwrap();
    is_send(&job.run(|_| async {}));
    is_send(&job.run_forever(|_| async {}));
}
