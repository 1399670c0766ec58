//! The workload of a seed: processes that use nestlock, and faults, until the plan's end; then calm,
//! and a check of what is left.

use nestlock::LockClient;

use crate::{
    checks,
    clock::{MILLI, SECOND, now},
    kernel,
    kinds::{Kind, TTL},
    ledger::wrong,
    nemesis,
    net::{self, words},
    plan::Plan,
    queues,
    rng::Rng,
    trace::note,
    world::World,
};

/// How long tasks and clients may take to finish after the end of the workload.
const SETTLING: u64 = 60 * SECOND;
/// The last part of the workload, without new faults, so that late requests arrive before its end.
const QUIET: u64 = 10 * SECOND;

/// Creates what nestlock has once per program, such as the thread that reports events with the
/// feature `metrics`. All simulated processes share it, so it must not belong to one that may be
/// killed.
async fn start_what_is_shared() {
    let path = "/process-0/server-0";
    net::listen(path, 0, 0);
    let client = LockClient::connect(format!("redis+unix://{path}"))
        .await
        .expect("no fault yet");
    client.shutdown().await.expect("nothing is held");
}

/// Runs a seed to its end, and checks what remains.
pub(crate) async fn run(plan: &Plan) {
    let mut rng = Rng(plan.seed ^ 0xfa17);
    let mut world = World::default();
    start_what_is_shared().await;
    (0..plan.kind.processes()).for_each(|_| world.boot(plan));
    while now() < plan.end {
        let strikes = !plan.faults.is_empty() && now() + QUIET < plan.end;
        let next = if strikes {
            now() + rng.between(MILLI, plan.gap)
        } else {
            plan.end
        };
        let wait = next.min(plan.end).saturating_sub(now());
        world.sleep(plan, wait).await;
        if strikes {
            nemesis::strike(plan, &mut world, &mut rng).await;
        }
    }
    net::with(net::Net::calm);
    net::changed();
    kernel::resume_all();
    note("the end", b"");
    let end = now() + SETTLING;
    while now() < end && !checks::is_settled() {
        world.sleep(plan, 20 * MILLI).await;
    }
    checks::unsettled();
    while net::with(|net| net.ending > 0) {
        world.sleep(plan, 20 * MILLI).await;
    }
    // unsettled requests end with their leases, queue entries of dead waiters with their patience
    world.sleep(plan, 2 * TTL).await;
    for server in 0..plan.kind.servers() {
        let keys = words(&net::ask(server, "KEYS *"));
        let is_left = |key: &String| match key.split_once(':') {
            Some(("redisson_lock_token", _)) => false,
            // the number of permits stays, and so do permits that have expired
            _ if plan.kind.has_permits() => false,
            // the last count, and who has counted
            _ if plan.kind == Kind::Latch => false,
            // a late request may have queued a dead waiter again: the next acquirer removes it
            Some((
                "redisson_lock_queue" | "redisson_lock_timeout" | "nestlock_fair_seen",
                lock,
            )) => !queues::is_queue_dead(server, lock),
            _ => true,
        };
        let left: Vec<&String> = keys.iter().filter(|key| is_left(key)).collect();
        if !left.is_empty() {
            wrong(|| format!("server {server} still has {left:?}"));
        }
    }
}
