//! The machine: one processor for all threads, which sleep in virtual time.
//!
//! Threads have their own stacks and thread-locals, but only the one that has the turn runs. It
//! keeps the turn until it would sleep, or reads the clock at a moment that the seed has chosen.
//! Then the next one is drawn from those that can run; if there is none, time jumps. `symbols.rs`
//! leads threads here, and `context.rs` passes the turn. All randomness comes from the seed.

use std::cell::Cell;

use crate::{
    clock::{Clock, MILLI, jump, now, pass},
    context::{self, Context},
    memory,
    process::{self, as_process},
    rng::Rng,
    sockets::has_events,
    trace,
    turn::{self, Turned},
};

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
}

static STATE: Turned<State> = Turned::new(State {
    threads: Vec::new(),
    living: Vec::new(),
    ready: Vec::new(),
    clocks: Vec::new(),
    order: Rng(0),
    entropy: Rng(0),
    interruptions: 0,
});

thread_local! {
    /// The index of this thread in `State::threads`.
    static SELF: Cell<usize> = const { Cell::new(0) };
    static UNINTERRUPTED: Cell<u32> = const { Cell::new(1) };
}

fn with<R>(act: impl FnOnce(&mut State) -> R) -> R {
    STATE.with(act)
}

/// Starts the machine. The caller becomes its first thread, and has the turn.
pub(crate) fn start(seed: u64, clocks: Vec<Clock>, interruptions: u64, loud: bool) {
    context::prepare();
    memory::prepare();
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
    trace::be_loud(loud);
    turn::set_on(true);
}

pub(crate) fn stop() {
    turn::set_on(false);
}

// --- time ---

/// Returns what a clock of the calling thread's process reads. Each read takes 100 ns, as code
/// takes time.
pub(crate) fn clock(counts_sleep: bool) -> u64 {
    let now = pass(100);
    interrupt();
    own_clock().read(now, counts_sleep)
}

/// Returns when a clock of the calling thread's process will have advanced by `nanos`, in true
/// time.
pub(crate) fn after(nanos: u64) -> u64 {
    own_clock().after(nanos)
}

/// Returns a copy of the clock of the calling thread's process.
fn own_clock() -> Clock {
    with(|state| {
        state
            .clocks
            .get(process::current())
            .copied()
            .unwrap_or_default()
    })
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
        let Some(slept) = state.clocks[process].sleep(until) else {
            return;
        };
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
    memory::reclaim(process);
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
    let process = process::current();
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
    process::join(new.process);
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
        unsafe { context::switch(context, next) };
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
                "deadlock: every thread waits for another one: {threads:#?}"
            );
            jump(next);
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
        trace::step(now, at);
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
