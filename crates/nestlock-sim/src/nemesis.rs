//! The nemesis: applies faults, one at a time, from the seed's mix, at times that the seed draws.

use std::time::Duration;

use crate::{
    clock::{MILLI, now},
    faults::Fault,
    kernel::{self, Which},
    kinds::{LOCKS, TTL, lock_name},
    ledger::book,
    net::{self, Cut},
    plan::{MOST_PROCESSES, Plan},
    process::as_process,
    rng::Rng,
    trace::note,
    world::World,
};

/// The errors with which a server refuses scripts.
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

/// Draws a fault and applies it.
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
    note(
        "fault",
        format!(
            "{fault:?} process {victim}, server {server}, {} ms",
            time / MILLI
        )
        .as_bytes(),
    );
    let everybody: Vec<usize> = (1..MOST_PROCESSES).collect();
    match fault {
        // the client's own thread still runs, and renews
        Fault::PauseUsers => {}
        Fault::PauseServer
        | Fault::Restart
        | Fault::Refuses
        | Fault::Forgets
        | Fault::ClockJumps => {
            book(|book| book.disturb(everybody.iter().copied(), until));
        }
        Fault::CutLate | Fault::SilenceAndCut => book(|book| book.disturb([victim], until + time)),
        Fault::Slow => book(|book| book.disturb([victim], until + 3 * time)),
        _ => book(|book| book.disturb([victim], until)),
    }
    let all_locks: Vec<String> = (0..LOCKS).map(lock_name).collect();
    // with several servers, a fault affects one path, or all paths of one process
    let servers: Vec<usize> = if rng.chance(50) {
        vec![server]
    } else {
        (0..plan.kind.servers()).collect()
    };
    let cut_all = || (1..MOST_PROCESSES).for_each(|process| net::cut(process, server, Cut::Lost));
    let cut = |how: Cut| {
        for server in &servers {
            net::cut(victim, *server, how);
        }
    };
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
        // a cut should hit a request in flight: waits up to 100 ms for one
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
            let which = if fault == Fault::PauseUsers {
                Which::Users
            } else {
                Which::All
            };
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
            // a holder whose reply is in flight has lost its lock as well
            book(|book| book.forgotten(&all_locks, now() + TTL));
            cut_all();
            net::ask(server, "FLUSHALL");
            net::ask(server, "SCRIPT FLUSH");
        }
        Fault::ClockJumps => {
            book(|book| book.void(&all_locks, now() + TTL));
            let (machine, clock) = net::with(|net| {
                (
                    net.servers[server].machine.clone(),
                    net.servers[server].process,
                )
            });
            as_process(clock, || machine.advance(Duration::from_nanos(time)));
        }
    }
    net::changed();
}
