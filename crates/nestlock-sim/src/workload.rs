//! The workload: processes whose tasks use nestlock as a program does, and check what it returns.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use nestlock::{AcquireOptions, Error, LockClient, LockGuard};
use tokio::sync::Notify;

use crate::{
    checks::{
        self, Doing, Gift, Given, Leaving, Mode, Who, book, count, count_error, does, enter, leave,
        wrong,
    },
    faults,
    kernel::{self, MILLI, Rng, SECOND, note, now},
    net::{self, Cut},
    plan::{Choice, MOST_PROCESSES, Plan, TTL},
};

/// How long tasks and clients may take to finish after the end of the workload.
const SETTLING: u64 = 60 * SECOND;
/// The last part of the workload, without new faults, so that late requests arrive before its end.
const QUIET: u64 = 10 * SECOND;

async fn nap(ms: u64) {
    tokio::time::sleep(Duration::from_millis(ms)).await;
}

/// What the [`World`] orders a process to do.
#[derive(Debug, Default)]
struct Orders {
    shut_down: Notify,
    is_shut_down: AtomicBool,
}

/// The running processes.
pub(crate) struct World {
    pub(crate) alive: Vec<usize>,
    last: usize,
    orders: BTreeMap<usize, Arc<Orders>>,
}

impl World {
    fn boot(&mut self, plan: &Plan) {
        self.last += 1;
        let process = self.last;
        self.alive.push(process);
        let urls: Vec<String> = (0..plan.kind.servers())
            .map(|server| {
                let path = format!("/process-{process}/server-{server}");
                net::listen(&path, process, server);
                format!("redis+unix://{path}")
            })
            .collect();
        let orders = Arc::new(Orders::default());
        self.orders.insert(process, Arc::clone(&orders));
        let plan = plan.clone();
        kernel::as_process(process, || {
            std::thread::spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build();
                runtime
                    .expect("a runtime")
                    .block_on(app(urls, process, plan, orders));
            });
        });
    }

    /// Kills a process and starts another one in its place, unless that exceeds [`MOST_PROCESSES`].
    /// Its requests in flight are executed from the time `late` on.
    pub(crate) fn crash(&mut self, plan: &Plan, process: usize, late: u64) {
        if self.last + 1 >= MOST_PROCESSES {
            return;
        }
        kernel::kill(process);
        (0..plan.kind.servers()).for_each(|server| net::cut(process, server, Cut::Late(late)));
        book(|book| book.crash(process));
        self.alive.retain(|alive| *alive != process);
        self.boot(plan);
    }

    pub(crate) fn shut_down(&self, process: usize) {
        self.orders[&process].shut_down.notify_one();
    }

    /// Lets `time` nanoseconds pass, and runs the checks every 20 ms.
    pub(crate) async fn sleep(&mut self, plan: &Plan, time: u64) {
        let until = now() + time;
        while now() < until {
            tokio::time::sleep(Duration::from_nanos((until - now()).min(20 * MILLI))).await;
            net::with(net::Net::accept_scripts_again);
            checks::look(plan);
        }
    }
}

/// Creates what nestlock has once per program, such as the thread that reports events with the
/// feature `metrics`. All simulated processes share it, so it must not belong to one that may be
/// killed.
async fn start_what_is_shared() {
    let path = "/process-0/server-0";
    net::listen(path, 0, 0);
    let client = LockClient::connect(format!("redis+unix://{path}"))
        .await
        .expect("nothing is wrong yet");
    client.shutdown().await.expect("nothing is held");
}

/// Runs a seed to its end, and checks what remains.
pub(crate) async fn run(plan: &Plan) {
    let mut rng = Rng(plan.seed ^ 0xfa17);
    let mut world = World {
        alive: Vec::new(),
        last: 0,
        orders: BTreeMap::new(),
    };
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
            faults::strike(plan, &mut world, &mut rng).await;
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
            // a late request may have queued a dead waiter again: the next acquirer removes it
            Some((
                "redisson_lock_queue" | "redisson_lock_timeout" | "nestlock_fair_seen",
                lock,
            )) => !checks::is_queue_dead(server, lock),
            _ => true,
        };
        let left: Vec<&String> = keys.iter().filter(|key| is_left(key)).collect();
        if !left.is_empty() {
            wrong(|| format!("server {server} still has {left:?}"));
        }
    }
}

/// Returns the strings of a RESP reply.
pub(crate) fn words(answer: &str) -> Vec<String> {
    let is_word = |line: &&str| !line.is_empty() && !line.starts_with(['*', '$']);
    answer
        .split("\r\n")
        .filter(is_word)
        .map(|line| line.trim_start_matches(',').to_owned())
        .collect()
}

/// Runs one process: connects and runs its tasks, and starts over after a shutdown.
async fn app(urls: Vec<String>, process: usize, plan: Plan, orders: Arc<Orders>) {
    let mut life = 0_u64;
    while now() < plan.end || life == 0 {
        let mut clients = Vec::new();
        for url in &urls {
            loop {
                let builder = LockClient::builder().watchdog_timeout(Duration::from_nanos(TTL));
                match builder.fair_patience(plan.patience()).connect(url).await {
                    Ok(client) => break clients.push(client),
                    Err(error) => count_error(&error),
                }
                nap(100).await;
            }
        }
        note("connected", &[process as u8]);
        orders.is_shut_down.store(false, Relaxed);
        book(|book| {
            book.clients
                .extend(clients.iter().map(|client| (process, client.clone())));
        });
        let task = |task| {
            let rng = Rng(plan.seed ^ (process as u64) << 32 ^ task << 48 ^ life << 56);
            let (clients, plan, orders) = (clients.clone(), plan.clone(), Arc::clone(&orders));
            Task {
                who: (process, task),
                clients,
                rng,
                plan,
                orders,
            }
        };
        let is_over = Arc::new(AtomicBool::new(false));
        let heir = plan
            .gives
            .then(|| tokio::spawn(task(plan.kind.tasks()).inherit(Arc::clone(&is_over))));
        let tasks: Vec<_> = (0..plan.kind.tasks())
            .map(|number| {
                does((process, number), Doing::Other("begins".into()));
                tokio::spawn(task(number).run())
            })
            .collect();
        let end = async {
            for task in tasks {
                task.await.expect("a task does not panic");
            }
        };
        tokio::pin!(end);
        tokio::select! {
            () = &mut end => {}
            () = orders.shut_down.notified() => {
                orders.is_shut_down.store(true, Relaxed);
                // if the user's runtime was paused, the order is old and its disturbance may be
                // over
                book(|book| book.disturb([process], now()));
                let names: Vec<_> = clients.iter().map(LockClient::shutdown).collect();
                for outcome in names {
                    if let Err(error) = outcome.await {
                        count_error(&error);
                    }
                }
                count("shut down");
                end.await;
            }
        }
        is_over.store(true, Relaxed);
        if let Some(heir) = heir {
            heir.await.expect("it does not panic");
        }
        book(|book| {
            let is_busy =
                |client: &LockClient| (client.stats().holds, client.stats().settling) != (0, 0);
            book.clients
                .retain(|(other, client)| *other != process || is_busy(client));
        });
        life += 1;
    }
    std::future::pending::<()>().await;
}

/// One hold of a task.
struct Hold {
    number: u64,
    guard: Arc<LockGuard>,
    choice: Choice,
    turn: u64,
}

struct Task {
    who: Who,
    clients: Vec<LockClient>,
    rng: Rng,
    plan: Plan,
    orders: Arc<Orders>,
}

impl Task {
    async fn run(mut self) {
        while now() < self.plan.end && !self.is_shut_down() {
            self.round().await;
            nap(self.rng.below(30 + self.plan.calm)).await;
        }
        self.take_all_given().await;
        book(|book| _ = book.tasks.remove(&self.who));
        note("task ends", format!("{:?}", self.who).as_bytes());
    }

    /// Releases or adopts what other tasks gave away: all of those tasks may be waiting for these
    /// locks.
    async fn inherit(mut self, is_over: Arc<AtomicBool>) {
        while !is_over.load(Relaxed) {
            nap(self.rng.between(500, 2_000)).await;
            self.take_given().await;
            book(|book| _ = book.tasks.remove(&self.who));
        }
        // this task may have given away what it adopted
        self.take_all_given().await;
        book(|book| _ = book.tasks.remove(&self.who));
    }

    async fn take_all_given(&mut self) {
        while self.take_given().await {
            nap(100).await;
        }
    }

    fn is_shut_down(&self) -> bool {
        self.orders.is_shut_down.load(Relaxed)
    }

    /// Acquires a lock, perhaps several times, and releases it.
    async fn round(&mut self) {
        let name = self.plan.kind.next_lock(&mut self.rng);
        if self.plan.gives && self.rng.chance(50) {
            self.take_given().await;
        }
        if self.plan.forces && self.rng.chance(3) {
            self.force(&name).await;
        }
        let depth = if self.plan.kind.nests() {
            self.rng.between(1, 3)
        } else {
            1
        };
        let (mut held, mut counts) = (Vec::<Hold>::new(), true);
        for nesting in 0..depth {
            let inside = held.last().map(|hold| hold.choice.mode);
            let turn = if self.plan.kind == crate::plan::Kind::Multi && nesting > 0 {
                held[0].turn
            } else {
                self.rng.next()
            };
            match self.acquire(&name, turn, inside, &mut counts).await {
                Some(one) => held.push(one),
                None => break,
            }
            if nesting == 0 && self.rng.chance(60) {
                break;
            }
        }
        if counts {
            self.check_count(&held).await;
        }
        if !held.is_empty() && !self.rng.chance(self.plan.kind.momentary()) {
            nap(match self.rng.below(10) {
                0 => self.rng.between(1_000, 6_000),
                1..4 => self.rng.between(50, 400),
                _ => self.rng.below(20),
            })
            .await;
        }
        if let Some(hold) = held.first()
            && self.rng.chance(10)
        {
            does(self.who, Doing::Other(format!("extends {name}")));
            let lease = Duration::from_millis(self.rng.between(20, 3_000));
            if let Err(error) = hold.guard.extend(lease).await {
                count_error(&error);
            }
        }
        does(self.who, Doing::Other(format!("releases {name}")));
        let alone = held.len() == 1;
        while !held.is_empty() {
            let at = self.rng.below(held.len() as u64) as usize;
            counts &= self.release(held.remove(at), alone).await;
            if counts {
                self.check_count(&held).await;
                does(self.who, Doing::Other(format!("releases {name}")));
            }
        }
        does(self.who, Doing::Other("is idle".into()));
    }

    async fn acquire(
        &mut self,
        name: &str,
        turn: u64,
        inside: Option<Mode>,
        counts: &mut bool,
    ) -> Option<Hold> {
        let kind = self.plan.kind;
        let choice = match kind.lock(&self.clients, name, turn, inside) {
            Ok(choice) => choice,
            Err(error) => {
                count_error(&error);
                return None;
            }
        };
        let mut how = AcquireOptions::new();
        if kind.has_values() && self.rng.chance(30) {
            // each value is used only once
            how = how.value(format!("v{}.{}.{turn}", self.who.0, self.who.1));
        } else if !kind.is_red() && kind.nests() {
            let owner = self.clients[0]
                .owner(format!("t{}", self.who.1))
                .expect("a good name");
            checks::waits_as(self.who, &owner);
            how = how.owner(owner);
        }
        let is_leased = self.rng.chance(if kind == crate::plan::Kind::Relay {
            5
        } else {
            25
        });
        if is_leased {
            // a lease shorter than the round trip would expire before the reply arrives
            how = how.lease(Duration::from_millis(
                self.rng.between(20 + 5 * self.plan.distance, 3_000),
            ));
        }
        let wait = match self.rng.below(4) {
            0 => Some(0),
            1 | 2 => Some(self.rng.between(1, 8_000)),
            _ => None,
        };
        let (began, pauses) = (now(), book(|book| book.pauses(self.who.0)));
        does(self.who, Doing::Acquires(choice.names.clone()));
        let lock = choice.lock.clone();
        let acquire = async move {
            match wait {
                Some(0) => lock.try_lock_with(how).await,
                Some(wait) => {
                    lock.try_lock_for_with(Duration::from_millis(wait), how)
                        .await
                }
                None => lock.lock_with(how).await.map(Some),
            }
        };
        let mut in_turn = true;
        let outcome = match self.rng.below(100) {
            // dropped before it completes
            0..15 => {
                let patience = Duration::from_millis(self.rng.between(0, 300));
                tokio::time::timeout(patience, acquire)
                    .await
                    .unwrap_or_else(|_| {
                        *counts = false;
                        Ok(None)
                    })
            }
            // begun, then not polled for a while: the lock may be acquired long before the call
            // returns
            15..18 => {
                *counts = false;
                in_turn = false;
                tokio::pin!(acquire);
                let first =
                    tokio::time::timeout(Duration::from_millis(self.rng.below(5)), &mut acquire)
                        .await;
                if let Ok(outcome) = first {
                    outcome
                } else {
                    does(self.who, Doing::Other(format!("does not poll for {name}")));
                    nap(self.rng.between(1_000, 5_000)).await;
                    if self.rng.chance(50) {
                        does(self.who, Doing::Acquires(choice.names.clone()));
                        acquire.await
                    } else {
                        Ok(None)
                    }
                }
            }
            _ => {
                let outcome = acquire.await;
                if let Some(wait) = wait.filter(|_| pauses == book(|book| book.pauses(self.who.0)))
                    && now() > began + wait * MILLI + checks::slack(&self.plan, self.who.0)
                    && !(wait == 0 || kind.is_red())
                {
                    let took = (now() - began) / MILLI;
                    wrong(|| {
                        format!(
                            "{:?} waited {took} ms for {name}, not {wait}: {:?}",
                            self.who,
                            outcome.is_ok()
                        )
                    });
                }
                outcome
            }
        };
        does(self.who, Doing::Other(format!("has tried {name}")));
        match outcome {
            Ok(Some(guard)) => {
                let (number, guard) = enter(
                    self.who,
                    choice.names.clone(),
                    choice.mode,
                    guard,
                    is_leased,
                    in_turn,
                );
                Some(Hold {
                    number,
                    guard,
                    choice,
                    turn,
                })
            }
            Ok(None) => {
                count("missed");
                None
            }
            Err(error) => {
                *counts = false;
                count_error(&error);
                if matches!(
                    error,
                    Error::NotReentrant { .. }
                        | Error::WrongLockKind { .. }
                        | Error::UpgradeRefused { .. }
                ) {
                    wrong(|| format!("{:?} acquires {name}: {error}", self.who));
                }
                None
            }
        }
    }

    /// Checks that the server's hold count is the task's own. After a fault it may be larger, if an
    /// acquire was executed late: the next release sets the right count.
    async fn check_count(&mut self, held: &[Hold]) {
        let Some(first) = held.first().filter(|_| self.rng.chance(20)) else {
            return;
        };
        let (owner, expected) = (first.guard.owner(), held.len());
        let same =
            |hold: &Hold| hold.choice.mode == first.choice.mode && hold.guard.owner() == owner;
        if self.plan.kind.is_red() || !held.iter().all(same) || first.choice.names.len() > 1 {
            return;
        }
        does(self.who, Doing::Other("counts".into()));
        let counted = first.choice.lock.hold_count(&owner).await;
        let is_void = book(|book| book.is_void(first.number) || book.is_miscounted(first.number));
        if let Ok(counted) = counted
            && (counted as usize) != expected
            && !(counted as usize > expected && book(|book| book.is_disturbed(self.who.0)))
            && !is_void
            && held.iter().all(|hold| !hold.guard.is_lost())
        {
            wrong(|| {
                format!(
                    "{:?} holds {} {expected} times, the server says {counted}",
                    self.who, first.choice.names[0]
                )
            });
        }
    }

    /// Releases a hold, or gives it away. Returns `true` if the server confirmed the release.
    async fn release(&mut self, hold: Hold, alone: bool) -> bool {
        let Hold {
            number,
            guard,
            choice,
            turn,
        } = hold;
        let lock = choice.names.join("+");
        if alone
            && self.plan.gives
            && self.rng.chance(25)
            && choice.names.len() == 1
            && !self.plan.kind.is_red()
        {
            if self.rng.chance(40) {
                self.hand_over(Hold {
                    number,
                    guard,
                    choice,
                    turn,
                })
                .await;
            } else {
                self.give(number, guard, lock, turn);
            }
            return false;
        }
        let (guard, leaving) = leave(number, guard);
        if leaving.is_lost {
            count("found lost");
            // a lost hold must stay lost
            if self.rng.chance(50) {
                nap(self.rng.between(1, 2_500)).await;
                if !guard.is_lost() {
                    wrong(|| format!("{:?} has {lock} back", self.who));
                }
            }
        }
        if self.rng.chance(25) {
            drop(guard);
            return false;
        }
        let Some(outcome) = self.left_midway(5, guard.unlock()).await else {
            return false;
        };
        note(
            "unlocked",
            format!("{:?} {lock} {}", self.who, outcome.is_ok()).as_bytes(),
        );
        if let Err(error) = &outcome {
            count_error(error);
        }
        checks::unlocked(self.who, &lock, leaving, outcome.as_ref().copied());
        outcome.is_ok()
    }

    /// Awaits a call to its end or, with a probability of `percent`, drops it before it completes.
    /// Returns `None` if it was dropped.
    async fn left_midway<T>(&mut self, percent: u64, call: impl Future<Output = T>) -> Option<T> {
        if !self.rng.chance(percent) {
            return Some(call.await);
        }
        let patience = Duration::from_millis(self.rng.below(20));
        tokio::time::timeout(patience, call).await.ok()
    }

    /// Gives a hold away: a task of any process may release it.
    fn give(&mut self, number: u64, guard: Arc<LockGuard>, lock: String, turn: u64) {
        let (guard, Leaving { .. }) = leave(number, guard);
        if self.rng.chance(30) {
            count("left to its lease");
            let _ = guard.leave_to_lease();
            return;
        }
        count("given away");
        let owner = guard.forget();
        note("gives", format!("{:?} {lock} {owner}", self.who).as_bytes());
        book(|book| {
            book.given.push(Given {
                lock,
                turn,
                gift: Gift::Forgotten(owner),
            });
        });
    }

    /// Hands a hold over: a task of any process may adopt it.
    async fn hand_over(&mut self, hold: Hold) {
        let Hold {
            number,
            guard,
            choice,
            turn,
        } = hold;
        let (lock, before) = (
            choice.names[0].clone(),
            book(|book| book.entries(&choice.names[0])),
        );
        let (guard, leaving) = leave(number, guard);
        let keep = Duration::from_millis(self.rng.between(10, 5_000));
        let Some(outcome) = self.left_midway(10, guard.hand_over(keep)).await else {
            return;
        };
        note(
            "handed over",
            format!("{:?} {lock} {}", self.who, outcome.is_ok()).as_bytes(),
        );
        match &outcome {
            Ok(_) => count("handed over"),
            Err(error) => count_error(error),
        }
        checks::unlocked(self.who, &lock, leaving, outcome.as_ref().map(|_| ()));
        if let Ok(hand_over) = outcome {
            book(|book| {
                book.given.push(Given {
                    lock,
                    turn,
                    gift: Gift::HandedOver(hand_over, before),
                });
            });
        }
    }

    /// Releases or adopts a hold that was given away. Returns `true` if there is more to take.
    async fn take_given(&mut self) -> bool {
        let Some(given) = book(|book| book.given.pop()) else {
            return false;
        };
        does(
            self.who,
            Doing::Other(format!("takes what was given of {}", given.lock)),
        );
        let Ok(choice) = self
            .plan
            .kind
            .lock(&self.clients, &given.lock, given.turn, None)
        else {
            return false;
        };
        book(|book| book.taking.insert(self.who, given.clone()));
        let outcome = match &given.gift {
            Gift::Forgotten(owner) => choice.lock.release(owner).await,
            Gift::HandedOver(hand_over, before) => match choice.lock.adopt(hand_over).await {
                Ok(guard) => {
                    book(|book| book.taking.remove(&self.who));
                    self.adopted(guard, choice, given.turn, *before).await;
                    return book(|book| !book.given.is_empty());
                }
                Err(error) => Err(error),
            },
        };
        book(|book| book.taking.remove(&self.who));
        note(
            "taken for another",
            format!("{:?} {} {}", self.who, given.lock, outcome.is_ok()).as_bytes(),
        );
        match outcome {
            Ok(()) | Err(Error::NotHeld { .. } | Error::Lost { .. }) => {
                book(|book| !book.given.is_empty())
            }
            Err(error) => {
                count_error(&error);
                book(|book| book.given.push(given));
                !self.is_shut_down()
            }
        }
    }

    /// Checks that no other task had the lock between hand-over and adoption, unless the server
    /// lost the record. Then releases the hold.
    async fn adopted(&mut self, guard: LockGuard, choice: Choice, turn: u64, before: u64) {
        count("adopted");
        let (entries, void) = book(|book| {
            (
                book.entries(&choice.names[0]),
                book.may_vanish(&choice.names),
            )
        });
        let between = entries - before;
        if between > 0 && choice.mode == Mode::Alone && !void {
            wrong(|| {
                format!(
                    "{:?} adopted {}, which {between} had in between",
                    self.who, choice.names[0]
                )
            });
        }
        let (number, guard) = enter(
            self.who,
            choice.names.clone(),
            choice.mode,
            guard,
            false,
            false,
        );
        nap(self.rng.below(100)).await;
        self.release(
            Hold {
                number,
                guard,
                choice,
                turn,
            },
            true,
        )
        .await;
    }

    /// Frees a lock from its holders, as an operator would.
    async fn force(&mut self, name: &str) {
        does(self.who, Doing::Other(format!("frees {name}")));
        let turn = self.rng.next();
        let Ok(choice) = self.plan.kind.lock(&self.clients, name, turn, None) else {
            return;
        };
        // without a reply, the request may still be executed late
        book(|book| {
            book.forced(&choice.names, self.who.0, now() + 20 * SECOND);
            book.disturb(1..MOST_PROCESSES, now() + 20 * SECOND);
        });
        if let Err(error) = choice.lock.force_unlock().await {
            count_error(&error);
        }
        count("freed");
    }
}
