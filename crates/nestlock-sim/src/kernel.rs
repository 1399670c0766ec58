//! The machine: virtual time, seeded randomness, and one processor for all threads.
//!
//! Threads have their own stacks and thread-locals, but only the one that has the turn runs. It
//! keeps the turn until it would sleep, or reads the clock at a moment that the seed has chosen.
//! Then the next one is drawn from those that can run; if there is none, time jumps. `symbols.rs`
//! leads threads here, and passes the turn.

use std::{
    cell::{Cell, UnsafeCell},
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
};

use crate::{sockets::has_events, symbols::Context};

pub(crate) const MICRO: u64 = 1_000;
pub(crate) const MILLI: u64 = 1_000_000;
pub(crate) const SECOND: u64 = 1_000_000_000;

/// What every clock reads at the start.
const EPOCH: u64 = 1_000 * SECOND;

/// A small random number generator: splitmix64.
#[derive(Debug, Clone)]
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    pub(crate) fn between(&mut self, least: u64, most: u64) -> u64 {
        least + self.below(most - least + 1)
    }

    pub(crate) fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// What a thread without the turn waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waits {
    /// Nothing: the thread was interrupted, or is new.
    No,
    /// An event on `epoll`, or the time `until`.
    Event {
        epoll: i32,
        until: Option<u64>,
        has_come: bool,
    },
    /// A wake-up at `address`, or the time `until`.
    Futex {
        address: usize,
        until: Option<u64>,
        woken: bool,
    },
    Until(u64),
    /// Nothing: the thread has ended, or its process was killed.
    ForEver,
}

#[derive(Debug)]
struct Thread {
    process: usize,
    /// The thread runs the user's runtime, and is not the client's own.
    is_users: bool,
    waits: Waits,
    paused_until: u64,
    context: &'static Context,
}

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Clock {
    /// How much faster than true time the clock runs, in millionths.
    drift: i64,
    /// How long the machine slept before `sleeps`, in nanoseconds.
    slept: u64,
    /// The beginning and the end of its latest sleep.
    sleeps: (u64, u64),
}

impl Clock {
    pub(crate) fn new(drift: i64) -> Self {
        Self {
            drift,
            slept: 0,
            sleeps: (0, 0),
        }
    }

    /// Returns how long the machine has slept by `now`, in true time.
    fn slept(&self, now: u64) -> u64 {
        self.slept + now.clamp(self.sleeps.0, self.sleeps.1) - self.sleeps.0
    }
}

#[derive(Debug)]
struct State {
    threads: Vec<Thread>,
    /// Threads that do not wait for ever.
    living: Vec<usize>,
    /// Threads that can run, from which the next one is drawn.
    ready: Vec<usize>,
    clocks: Vec<Clock>,
    order: Rng,
    entropy: Rng,
    /// How many of 10,000 reads of the clock are interrupted.
    interruptions: u64,
    sum: u64,
    steps: u64,
}

/// A value that only the thread with the turn touches.
pub(crate) struct Turned<T>(UnsafeCell<T>);

// SAFETY: only one thread has the turn
unsafe impl<T> Sync for Turned<T> {}

impl<T> Turned<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    pub(crate) fn with<R>(&self, act: impl FnOnce(&mut T) -> R) -> R {
        // SAFETY: the caller has the turn, and `act` never comes back here
        act(unsafe { &mut *self.0.get() })
    }
}

static STATE: Turned<State> = Turned::new(State {
    threads: Vec::new(),
    living: Vec::new(),
    ready: Vec::new(),
    clocks: Vec::new(),
    order: Rng(0),
    entropy: Rng(0),
    interruptions: 0,
    sum: 0xcbf2_9ce4_8422_2325,
    steps: 0,
});
static ON: AtomicBool = AtomicBool::new(false);
static LOUD: AtomicBool = AtomicBool::new(false);
/// True time, in nanoseconds.
static NOW: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static PROCESS: Cell<usize> = const { Cell::new(0) };
    /// The index of this thread in `State::threads`.
    static SELF: Cell<usize> = const { Cell::new(0) };
    static UNINTERRUPTED: Cell<u32> = const { Cell::new(1) };
}

fn with<R>(act: impl FnOnce(&mut State) -> R) -> R {
    STATE.with(act)
}

/// Starts the machine. The caller becomes its first thread, and has the turn.
pub(crate) fn start(seed: u64, clocks: Vec<Clock>, interruptions: u64, loud: bool) {
    crate::symbols::prepare();
    crate::memory::prepare();
    with(|state| {
        state.living.push(0);
        state.threads.push(Thread {
            process: 0,
            is_users: false,
            waits: Waits::No,
            paused_until: 0,
            context: Box::leak(Box::new(Context::new())),
        });
        (state.order, state.entropy) = (Rng(seed ^ 0xabcd), Rng(seed ^ 0x5eed));
        (state.clocks, state.interruptions) = (clocks, interruptions);
    });
    LOUD.store(loud, Relaxed);
    ON.store(true, Relaxed);
}

pub(crate) fn stop() {
    ON.store(false, Relaxed);
}

pub(crate) fn is_on() -> bool {
    ON.load(Relaxed)
}

pub(crate) fn is_loud() -> bool {
    LOUD.load(Relaxed)
}

// --- time ---

/// Returns true time, in nanoseconds.
pub(crate) fn now() -> u64 {
    NOW.load(Relaxed)
}

/// Returns what a clock of the calling thread's process reads. Each read takes 100 ns, as code
/// takes time.
pub(crate) fn clock(counts_sleep: bool) -> u64 {
    let now = NOW.fetch_add(100, Relaxed) + 100;
    interrupt();
    with(|state| {
        let clock = state.clocks.get(PROCESS.get()).copied().unwrap_or_default();
        let slept = if counts_sleep { 0 } else { clock.slept(now) };
        EPOCH + (now as i64 + now as i64 / 1_000_000 * clock.drift) as u64 - slept
    })
}

/// Returns when a clock of the calling thread's process will have advanced by `nanos`, in true
/// time.
pub(crate) fn after(nanos: u64) -> u64 {
    let drift = with(|state| {
        state
            .clocks
            .get(PROCESS.get())
            .map_or(0, |clock| clock.drift)
    });
    now().saturating_add(
        (u128::from(nanos) * 1_000_000 / (1_000_000 + drift) as u128) as u64 + MICRO,
    )
}

// --- randomness ---

pub(crate) fn fill(bytes: &mut [u8]) {
    with(|state| {
        for byte in bytes {
            *byte = state.entropy.next() as u8;
        }
    });
}

// --- processes ---

/// Runs `look` as another process: by its clock, and as the owner of what `look` starts.
pub(crate) fn as_process<R>(process: usize, look: impl FnOnce() -> R) -> R {
    let before = PROCESS.replace(process);
    let result = look();
    PROCESS.set(before);
    result
}

/// Returns the process of the calling thread, or the one that it acts as.
pub(crate) fn process() -> usize {
    PROCESS.get()
}

/// Runs `act` without interruptions: it is the simulator's own code.
pub(crate) fn uninterrupted<R>(act: impl FnOnce() -> R) -> R {
    UNINTERRUPTED.set(UNINTERRUPTED.get() + 1);
    let result = act();
    UNINTERRUPTED.set(UNINTERRUPTED.get() - 1);
    result
}

/// Selects threads of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which {
    All,
    /// The user's runtime alone.
    Users,
}

/// Stops threads of a process at their next sleep, until the time `until`.
pub(crate) fn pause(process: usize, which: Which, until: u64) {
    with(|state| {
        for thread in state
            .threads
            .iter_mut()
            .filter(|thread| thread.process == process)
        {
            if which == Which::All || thread.is_users {
                thread.paused_until = thread.paused_until.max(until);
            }
        }
    });
}

/// Lets the machine of a process sleep until the time `until`.
pub(crate) fn sleep_machine(process: usize, until: u64) {
    pause(process, Which::All, until);
    with(|state| {
        let clock = &mut state.clocks[process];
        let awake_until = now().max(clock.sleeps.1);
        let Some(slept) = until.checked_sub(awake_until) else {
            return;
        };
        clock.slept = clock.slept(awake_until);
        clock.sleeps = (awake_until, until);
        // timers stand still with the monotonic clock
        for thread in state
            .threads
            .iter_mut()
            .filter(|thread| thread.process == process)
        {
            if let Waits::Event {
                until: Some(until), ..
            } = &mut thread.waits
            {
                *until += slept;
            }
        }
    });
}

pub(crate) fn resume_all() {
    with(|state| {
        state
            .threads
            .iter_mut()
            .for_each(|thread| thread.paused_until = 0);
    });
}

/// Kills a process with everything that it had in memory. The network closes its sockets.
pub(crate) fn kill(process: usize) {
    let is_parked = |thread: &Thread| matches!(thread.waits, Waits::Event { .. } | Waits::ForEver);
    // a running thread may hold what others wait for, as all processes are threads of one program:
    // kills it only while it sleeps
    while !with(|state| {
        state
            .threads
            .iter()
            .filter(|thread| thread.process == process)
            .all(is_parked)
    }) {
        sleep_until(now() + MILLI);
    }
    with(|state| {
        for thread in state
            .threads
            .iter_mut()
            .filter(|thread| thread.process == process)
        {
            thread.waits = Waits::ForEver;
        }
        state
            .living
            .retain(|at| state.threads[*at].process != process);
    });
    crate::memory::reclaim(process);
}

// --- turns ---

/// What a new thread needs to [`begin`].
pub(crate) struct NewThread {
    number: usize,
    process: usize,
    pub(crate) context: &'static Context,
}

/// Adds a thread to the caller's process.
pub(crate) fn add_thread() -> NewThread {
    let process = PROCESS.get();
    // the list may grow, and must survive if the process is killed
    let add = || {
        with(|state| {
            let is_users = !state
                .threads
                .iter()
                .any(|thread| thread.process == process && thread.waits != Waits::ForEver);
            let context: &'static Context = Box::leak(Box::new(Context::new()));
            state.threads.push(Thread {
                process,
                is_users,
                waits: Waits::No,
                paused_until: 0,
                context,
            });
            let number = state.threads.len() - 1;
            state.living.push(number);
            NewThread {
                number,
                process,
                context,
            }
        })
    };
    as_process(0, add)
}

/// Initialises a new thread, before it stops until it has the turn. From then on it may be
/// interrupted anywhere.
pub(crate) fn begin(new: &NewThread) {
    SELF.set(new.number);
    PROCESS.set(new.process);
    UNINTERRUPTED.set(0);
}

/// Passes the turn, and returns when the caller has it again. Returns `true` if an event or a
/// wake-up came, `false` otherwise.
pub(crate) fn wait(waits: Waits) -> bool {
    let own = SELF.get();
    let (context, next) = with(|state| {
        state.threads[own].waits = waits;
        if waits == Waits::ForEver {
            state.living.retain(|at| *at != own);
        }
        let next = choose(state);
        (
            state.threads[own].context,
            (next != own).then(|| state.threads[next].context),
        )
    });
    if let Some(next) = next {
        // SAFETY: all threads but the caller are stopped
        unsafe { crate::symbols::switch(context, next) };
    }
    with(|state| {
        let waits = std::mem::replace(&mut state.threads[own].waits, Waits::No);
        matches!(
            waits,
            Waits::Futex { woken: true, .. } | Waits::Event { has_come: true, .. }
        )
    })
}

/// Draws the next thread from those that can run. If there are none, time jumps until there is one.
fn choose(state: &mut State) -> usize {
    let State {
        threads,
        living,
        ready,
        ..
    } = state;
    loop {
        let (now, mut next) = (now(), u64::MAX);
        ready.clear();
        for at in living.iter().copied() {
            let thread = &threads[at];
            let due = match thread.waits {
                Waits::No | Waits::Futex { woken: true, .. } => Some(0),
                Waits::Event { epoll, .. } if has_events(epoll) => Some(thread.paused_until),
                Waits::Event { until, .. } => until.map(|until| until.max(thread.paused_until)),
                Waits::Futex { until, .. } => until,
                Waits::Until(until) => Some(until),
                Waits::ForEver => None,
            };
            match due {
                Some(due) if due <= now => ready.push(at),
                Some(due) => next = next.min(due),
                None => {}
            }
        }
        if ready.is_empty() {
            assert!(
                next < u64::MAX,
                "everybody waits for somebody else: {threads:#?}"
            );
            NOW.store(next, Relaxed);
            continue;
        }
        let at = if ready.len() == 1 {
            ready[0]
        } else {
            state.order.pick(ready)
        };
        if let Waits::Event {
            epoll, has_come, ..
        } = &mut threads[at].waits
        {
            *has_come = has_events(*epoll);
        }
        state.steps += 1;
        state.sum = mix(state.sum ^ now ^ (at as u64) << 56);
        return at;
    }
}

/// Passes the turn if the seed says so.
fn interrupt() {
    if UNINTERRUPTED.get() == 0
        && with(|state| state.interruptions > 0 && state.order.below(10_000) < state.interruptions)
    {
        wait(Waits::No);
    }
}

pub(crate) fn sleep_until(time: u64) {
    if time > now() {
        wait(Waits::Until(time));
    }
}

/// Wakes at most `most` of the threads that wait at this address. Returns their number.
pub(crate) fn wake(address: usize, most: usize) -> usize {
    with(|state| {
        let mut count = 0;
        for thread in &state.living {
            if count < most
                && let Waits::Futex {
                    address: at, woken, ..
                } = &mut state.threads[*thread].waits
                && *at == address
                && !*woken
            {
                *woken = true;
                count += 1;
            }
        }
        count
    })
}

// --- the trace ---

/// Adds an event to the trace. The same seed must lead to the same sum.
pub(crate) fn note(what: &str, bytes: &[u8]) {
    with(|state| {
        for words in [what.as_bytes(), bytes] {
            for word in words.chunks(8) {
                let mut eight = [0; 8];
                eight[..word.len()].copy_from_slice(word);
                state.sum = mix(state.sum ^ u64::from_le_bytes(eight));
            }
            state.sum = mix(state.sum ^ words.len() as u64);
        }
        state.sum = mix(state.sum ^ now());
    });
    if is_loud() {
        println!("{:>12.6} {what} {}", now() as f64 / 1e9, readable(bytes));
    }
}

/// Formats requests and replies as one line, without the syntax of RESP.
fn readable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let words = text
        .split("\r\n")
        .filter(|word| !word.is_empty() && !word.starts_with(['*', '$', '>']));
    let words = words.map(|word| if word.len() > 200 { "<script>" } else { word });
    words.collect::<Vec<_>>().join(" ")
}

/// Returns the sum of the trace, and how often a next thread was drawn.
pub(crate) fn sum() -> (u64, u64) {
    with(|state| (state.sum, state.steps))
}

/// Pins a child to one processor. Its threads run one at a time, and a thread that wakes on another
/// processor starts late.
pub(crate) fn pin(child: &mut std::process::Command, job: usize) {
    use std::os::unix::process::CommandExt as _;
    let pin = move || {
        // SAFETY: a set of processors is plain data
        unsafe {
            let mut all: libc::cpu_set_t = std::mem::zeroed();
            libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut all);
            let ours: Vec<usize> = (0..1024)
                .filter(|cpu| libc::CPU_ISSET(*cpu, &all))
                .collect();
            let mut one: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(ours[job % ours.len()], &mut one);
            libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const one);
        }
        Ok(())
    };
    // SAFETY: the hook makes system calls and allocates a small list, in the fork of a program
    // whose other threads only wait for their children
    unsafe { child.pre_exec(pin) };
}

/// Returns the processor time of all children that have ended, in seconds.
pub(crate) fn spent_by_children() -> f64 {
    // SAFETY: plain data, which the call fills in
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}
