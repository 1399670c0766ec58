//! What goes wrong: one at a time, of the seed's mix, at times that the seed draws.

use std::time::Duration;

use crate::{
    checks::{book, lock_name},
    kernel::{self, MILLI, Rng, Which, note, now},
    net::{self, Cut},
    plan::{LOCKS, MOST_PROCESSES, Plan, TTL},
    workload::World,
};

/// A kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Nothing arrives, either way or one way, and then all of it.
    Silence,
    SilenceUp,
    SilenceDown,
    /// Silence, and in the midst of it the end of the connection: what was sent meanwhile is executed late.
    SilenceAndCut,
    CutLost,
    CutLate,
    /// The process stops, as by SIGSTOP.
    PauseProcess,
    /// Only the user's runtime does.
    PauseUsers,
    PauseServer,
    /// The machine of a process sleeps, and its monotonic clock with it.
    MachineSleeps,
    Slow,
    /// Nothing of a process remains but what is under way.
    Crash,
    /// The server restarts with its records, and without its scripts.
    Restart,
    /// The server answers scripts with errors.
    Refuses,
    Shutdown,
    /// The server forgets everything.
    Forgets,
    /// The server's clock jumps.
    ClockJumps,
    /// Replies are swallowed, doubled or swapped, and their connections go on.
    Strays,
}

/// What a server says instead of running a script.
const REFUSALS: [&str; 8] = [
    "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
    "OOM command not allowed when used memory > 'maxmemory'.",
    "LOADING Redis is loading the dataset in memory",
    "READONLY You can't write against a read only replica.",
    "NOREPLICAS Not enough good replicas to write.",
    "MISCONF Errors writing to the AOF file: No space left on device",
    "CLUSTERDOWN The cluster is down",
    "TRYAGAIN Multiple keys request during rehashing of slot",
];

impl Fault {
    pub(crate) const ALL: [Self; 18] = [
        Self::Silence,
        Self::SilenceUp,
        Self::SilenceDown,
        Self::SilenceAndCut,
        Self::CutLost,
        Self::CutLate,
        Self::PauseProcess,
        Self::PauseUsers,
        Self::PauseServer,
        Self::MachineSleeps,
        Self::Slow,
        Self::Crash,
        Self::Restart,
        Self::Refuses,
        Self::Shutdown,
        Self::Forgets,
        Self::ClockJumps,
        Self::Strays,
    ];
}

/// Lets a fault happen.
#[expect(clippy::too_many_lines)] // one after the other
pub(crate) async fn strike(plan: &Plan, world: &mut World, rng: &mut Rng) {
    let fault = rng.pick(&plan.faults);
    let victim = rng.pick(&world.alive);
    let server = rng.below(plan.kind.servers() as u64) as usize;
    let time = match rng.below(3) {
        0 => rng.between(1, 50),
        1 => rng.between(50, 1_500),
        _ => rng.between(1_500, 8_000),
    } * MILLI;
    let until = now() + time;
    note("fault", format!("{fault:?} process {victim}, server {server}, {} ms", time / MILLI).as_bytes());
    let everybody: Vec<usize> = (1..MOST_PROCESSES).collect();
    match fault {
        // what concerns the user's part alone
        Fault::PauseUsers => {}
        Fault::PauseServer | Fault::Restart | Fault::Refuses | Fault::Forgets | Fault::ClockJumps => {
            book(|book| book.disturb(everybody.iter().copied(), until));
        }
        Fault::CutLate | Fault::SilenceAndCut => book(|book| book.disturb([victim], until + time)),
        Fault::Slow => book(|book| book.disturb([victim], until + 3 * time)),
        _ => book(|book| book.disturb([victim], until)),
    }
    let all_locks: Vec<String> = (0..LOCKS).map(lock_name).collect();
    // with several servers, a fault may be on one path or on all of one process
    let servers: Vec<usize> = if rng.chance(50) { vec![server] } else { (0..plan.kind.servers()).collect() };
    let cut_all = || (1..MOST_PROCESSES).for_each(|process| net::cut(process, server, Cut::Lost));
    let cut = |how: Cut| servers.iter().for_each(|server| net::cut(victim, *server, how));
    let silence = |up: bool, down: bool| {
        net::with(|net| {
            for server in &servers {
                let path = &mut net.paths[victim][*server];
                if up {
                    path.up_silent_until = path.up_silent_until.max(until);
                }
                if down {
                    path.down_silent_until = path.down_silent_until.max(until);
                }
            }
        });
    };
    if matches!(fault, Fault::CutLost | Fault::CutLate) {
        // better in the midst of something
        for _ in 0..100 {
            if net::is_busy(victim, server) {
                break;
            }
            world.sleep(plan, MILLI).await;
        }
    }
    match fault {
        Fault::Silence => silence(true, true),
        Fault::SilenceUp => silence(true, false),
        Fault::SilenceDown => silence(false, true),
        Fault::SilenceAndCut => {
            silence(true, true);
            world.sleep(plan, rng.below(time)).await;
            let late = now() + rng.below(time);
            // it may have crashed meanwhile
            cut(Cut::Late(late));
        }
        Fault::Strays => net::with(|net| {
            for server in &servers {
                net.paths[victim][*server].strays_until = until;
            }
        }),
        Fault::CutLost => cut(Cut::Lost),
        Fault::CutLate => cut(Cut::Late(until)),
        Fault::PauseProcess | Fault::PauseUsers => {
            book(|book| book.pause(victim, until));
            let which = if fault == Fault::PauseUsers { Which::Users } else { Which::All };
            kernel::pause(victim, which, until);
        }
        Fault::MachineSleeps => {
            book(|book| book.pause(victim, until));
            kernel::sleep_machine(victim, until);
        }
        Fault::PauseServer => {
            net::with(|net| net.servers[server].paused_until = until);
        }
        Fault::Slow => net::with(|net| {
            for server in &servers {
                let path = &mut net.paths[victim][*server];
                (path.slow_until, path.slow_ms) = (now() + 2 * time, time / MILLI / 4 + 1);
            }
        }),
        Fault::Crash => world.crash(plan, victim, until),
        Fault::Restart => {
            cut_all();
            net::with(|net| net.servers[server].refuses_connections_until = until);
            net::ask(server, "SCRIPT FLUSH");
        }
        Fault::Refuses => {
            let error = rng.pick(&REFUSALS);
            note("refuses", error.as_bytes());
            net::with(|net| {
                net.servers[server].machine.refuse(Some(error));
                net.servers[server].refuses_scripts_until = until;
            });
        }
        Fault::Shutdown => world.shut_down(victim),
        Fault::Forgets => {
            // whose answer is under way now, too, has nothing
            book(|book| book.void(&all_locks, now() + TTL));
            cut_all();
            net::ask(server, "FLUSHALL");
            net::ask(server, "SCRIPT FLUSH");
        }
        Fault::ClockJumps => {
            book(|book| book.void(&all_locks, now() + TTL));
            let (machine, clock) = net::with(|net| (net.servers[server].machine.clone(), net.servers[server].process));
            kernel::as_process(clock, || machine.advance(Duration::from_nanos(time)));
        }
    }
    net::changed();
}
