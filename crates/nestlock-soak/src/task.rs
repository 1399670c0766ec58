//! A task: acquires locks, checks its holds, releases them, and records all of it.

mod calm;

use std::{sync::Arc, time::Duration};

use nestlock::{AcquireOptions, LockGuard};
use rand::{Rng, rngs::StdRng};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::{
    clock::now,
    handover::{self, name, result},
    history::word,
    kinds::{Choice, Class, Kind, PERMITS},
    process::{Connected, Process},
    settings::LONGEST_LEASE,
};

/// How many holds an owner nests at most.
const DEPTH: usize = 3;

pub(crate) struct Task {
    process: Arc<Process>,
    client: Connected,
    name: String,
    rng: StdRng,
    /// Holds that it left to their lease and that are not released yet.
    given: JoinSet<()>,
}

/// How an acquire waits.
#[derive(Debug, Clone, Copy)]
enum Way {
    Try,
    Bounded(Duration),
    /// The future is dropped after this time.
    Cancelled(Duration),
    Unbounded,
    /// Like `Unbounded`, but it must succeed within this time.
    Calm(Duration),
}

struct Held {
    op: u64,
    guard: LockGuard,
    choice: Choice,
    lease: Option<Duration>,
    was_lost: bool,
}

impl Task {
    pub(crate) fn new(process: Arc<Process>, client: Connected, number: u64) -> Self {
        let name = format!("{}t{number}", client.name);
        let salt = name.bytes().fold(0, |salt: u64, byte| {
            salt.wrapping_mul(31).wrapping_add(u64::from(byte))
        });
        let rng = process.settings.rng(salt);
        Self {
            process,
            client,
            name,
            rng,
            given: JoinSet::new(),
        }
    }

    pub(crate) async fn work(&mut self) {
        while now() < self.process.until {
            self.round().await;
            sleep(self.between(0, 10_000)).await;
            while self.given.try_join_next().is_some() {}
        }
        while self.given.join_next().await.is_some() {}
    }

    /// Draws a duration. `least` and `most` are in microseconds.
    fn between(&mut self, least: u64, most: u64) -> Duration {
        Duration::from_micros(self.rng.random_range(least..=most))
    }

    fn write(&self, what: impl std::fmt::Display) {
        self.process.history.write(what);
    }

    fn pick(&mut self) -> Choice {
        let settings = &self.process.settings;
        let kind = if self.rng.random_ratio(3, 4) {
            settings.hot(now())
        } else {
            settings.only[self.rng.random_range(0..settings.only.len())]
        };
        Choice::random(
            &self.client.servers,
            kind,
            self.client.watchdog,
            &mut self.rng,
        )
    }

    fn way(&mut self) -> Way {
        match self.rng.random_range(0..20) {
            0..3 => Way::Try,
            3..11 => Way::Bounded(self.between(1_000, 1_000_000)),
            11..15 => Way::Cancelled(self.between(100, 60_000)),
            _ => Way::Unbounded,
        }
    }

    /// Draws a lease: mostly none, otherwise mostly a short one.
    fn lease(&mut self) -> Option<Duration> {
        let most = if self.rng.random_ratio(2, 3) {
            250_000
        } else {
            LONGEST_LEASE.as_micros() as u64
        };
        self.rng
            .random_ratio(1, 4)
            .then(|| self.between(60_000, most))
    }

    async fn round(&mut self) {
        if self.rng.random_ratio(1, 2) {
            self.take_given().await;
        }
        let choice = self.pick();
        let (depth, way) = (
            if choice.kind.nests() && !choice.per_acquire {
                self.rng.random_range(1..=DEPTH)
            } else {
                1
            },
            self.way(),
        );
        let lease = self.lease();
        let Some(first) = self.acquire(choice, way, lease, None).await else {
            return;
        };
        let (mut held, mut counts) = (vec![first], true);
        while held.len() < depth && counts {
            let inner =
                held[0]
                    .choice
                    .inner(&self.client.servers, self.client.watchdog, &mut self.rng);
            let (way, parent) = (self.way(), held[0].op);
            let lease = self.lease();
            match self.acquire(inner, way, lease, Some(parent)).await {
                Some(one) => held.push(one),
                None => counts = false,
            }
        }
        let time = match self.rng.random_range(0..100) {
            0..70 => self.between(0, 3_000),
            // to the end of the lease and beyond
            _ if lease.is_some() && self.rng.random_ratio(2, 3) => {
                lease.unwrap_or_default().mul_f64(1.1)
            }
            70..98 => self.between(3_000, 40_000),
            _ => self.between(100_000, 2_500_000),
        };
        self.hold(&mut held, time).await;
        if counts {
            self.ask(&mut held).await;
        }
        self.let_go(held).await;
    }

    /// Says how many permits there are, if the server does not know.
    async fn set_number(&self, choice: &Choice) {
        let semaphore = self.client.servers[0].semaphore(&choice.names[0]);
        let _ = semaphore
            .expect("a good name")
            .try_set_permits(PERMITS)
            .await;
    }

    async fn acquire(
        &mut self,
        choice: Choice,
        way: Way,
        lease: Option<Duration>,
        parent: Option<u64>,
    ) -> Option<Held> {
        let way = if choice.kind == Kind::Semaphore {
            self.set_number(&choice).await;
            match way {
                // after a restart without records, there is no number until a task sets it
                Way::Unbounded => Way::Bounded(Duration::from_secs(1)),
                way => way,
            }
        } else {
            way
        };
        let op = self.process.op();
        let own = choice.per_acquire || !choice.kind.nests();
        let who = if own {
            format!("{}#{op}", self.name)
        } else {
            self.name.clone()
        };
        let mut options = AcquireOptions::new();
        if let Some(lease) = lease {
            options = options.lease(lease);
        }
        // an acquire with a value cannot be retried under another name, so it would fail if its
        // reply were lost as calm begins
        if choice.kind.has_values() && self.rng.random_ratio(1, 3) && !matches!(way, Way::Calm(_)) {
            options = options.value(format!("value-{who}"));
        }
        let (way_name, limit) = match way {
            Way::Try => ("try", Some(Duration::ZERO)),
            Way::Bounded(limit) => ("bounded", Some(limit)),
            Way::Cancelled(limit) => ("cancelled", Some(limit)),
            Way::Unbounded => ("unbounded", None),
            Way::Calm(limit) => ("calm", Some(limit)),
        };
        let or_dash =
            |number: Option<u128>| number.map_or("-".to_owned(), |number| number.to_string());
        self.write(format_args!(
            "call {op} {} {who} {} {} {} {way_name} {} {} {}",
            self.name,
            choice.kind.name(),
            choice.names.join("+"),
            choice.class.name(),
            or_dash(limit.map(|limit| limit.as_millis())),
            or_dash(lease.map(|lease| lease.as_millis())),
            or_dash(parent.map(u128::from)),
        ));
        let (lock, trip) = (&choice.lock, self.client.round_trip(choice.kind));
        let outcome = match way {
            Way::Try => Some(lock.try_lock_with(options).await),
            Way::Bounded(limit) => Some(lock.try_lock_for_with(limit, options).await),
            Way::Unbounded => Some(lock.lock_with(options).await.map(Some)),
            Way::Cancelled(limit) | Way::Calm(limit) => timeout(limit, lock.lock_with(options))
                .await
                .ok()
                .map(|locked| locked.map(Some)),
        };
        let trip = trip.max(self.client.round_trip(choice.kind));
        self.write(format_args!("trip {op} {}", trip.as_micros()));
        match outcome {
            Some(Ok(Some(guard))) => {
                let token = guard
                    .fencing_token()
                    .map_or("-".to_owned(), |token| token.to_string());
                self.write(format_args!(
                    "got {op} {} {token}",
                    word(guard.owner().as_str())
                ));
                return Some(Held {
                    op,
                    guard,
                    choice,
                    lease,
                    was_lost: false,
                });
            }
            Some(Ok(None)) => self.write(format_args!("none {op}")),
            None => self.write(format_args!("gone {op}")),
            Some(Err(error)) => self.write(format_args!(
                "err {op} {} {}",
                name(&error),
                word(&error.to_string())
            )),
        }
        None
    }

    /// Checks all holds until the time is over.
    async fn hold(&mut self, held: &mut [Held], time: Duration) {
        let until = now() + time.as_nanos() as u64;
        let (mut pause, extends) = (500, self.rng.random_ratio(1, 6));
        loop {
            for one in &mut *held {
                self.look(one).await;
            }
            if now() >= until || held.iter().all(|one| one.was_lost) {
                break;
            }
            let left = Duration::from_nanos(until.saturating_sub(now()));
            let first = &held[0];
            tokio::select! {
                () = sleep(Duration::from_micros(pause).min(left)) => {}
                _ = first.guard.lost(), if !first.was_lost => self.write(format_args!("told {}", first.op)),
            }
            pause = (pause * 2).min(10_000);
        }
        if extends && !held[0].was_lost {
            let (one, lease) = (
                &held[0],
                Duration::from_millis(self.rng.random_range(50..1500)),
            );
            self.write(format_args!("ext {} {}", one.op, lease.as_millis()));
            let outcome = one.guard.extend(lease).await;
            self.write(format_args!("extended {} {}", one.op, result(&outcome)));
            self.look(&mut held[0]).await;
        }
    }

    /// Records whether a hold is lost. The recorded time is from before the check, so that its
    /// result was true then.
    async fn look(&self, held: &mut Held) {
        let (time, remaining) = (now(), held.guard.remaining());
        if !held.guard.is_lost() {
            self.process.history.write_at(
                time,
                format_args!("ok {} {}", held.op, remaining.as_micros()),
            );
            return;
        }
        if !held.was_lost {
            held.was_lost = true;
            self.write(format_args!("lost {}", held.op));
            if let Ok(error) = timeout(Duration::from_secs(1), held.guard.lost()).await {
                self.write(format_args!("told {} {}", held.op, name(&error)));
            }
        }
    }

    /// Makes a guarded write, and queries the server for the hold count and the holder.
    async fn ask(&mut self, held: &mut [Held]) {
        let Held {
            op, choice, guard, ..
        } = &held[0];
        if let Some(token) = guard.fencing_token() {
            let key = format!("guarded:{}", choice.names[0]);
            self.write(format_args!("put {op} {key} {token}"));
            let outcome = self.client.servers[0]
                .fenced_set(&key, token.to_string(), token)
                .await;
            self.write(format_args!("done {op} {}", result(&outcome)));
        }
        let same = held.iter().all(|one| one.choice.class == choice.class);
        if same && choice.kind != Kind::Red && self.rng.random_ratio(1, 4) {
            let owner = guard.owner();
            if choice.names.len() == 1
                && let Ok(count) = choice.lock.hold_count(&owner).await
            {
                self.write(format_args!("count {op} {count} {}", held.len()));
            }
            if choice.class == Class::Alone
                && choice.kind.holders() == 1
                && choice.names.len() == 1
                && let Ok(holder) = choice.lock.holder().await
            {
                let holder = holder.map_or("-".to_owned(), |holder| word(holder.as_str()));
                self.write(format_args!(
                    "holder {op} {holder} {}",
                    word(owner.as_str())
                ));
            }
            // the replies are valid only if the lock is still held after them
            for one in held {
                self.look(one).await;
            }
        }
    }

    /// Releases the holds, in any order.
    async fn let_go(&mut self, mut held: Vec<Held>) {
        while !held.is_empty() {
            let alone = held.len() == 1;
            let one = held.remove(self.rng.random_range(0..held.len()));
            match self.rng.random_range(0..20) {
                0..2 if alone && one.choice.kind.has_one_owner() => self.leave(one),
                2 if alone
                    && one.choice.kind.has_one_owner()
                    && one.lease.is_some_and(|lease| lease < LONGEST_LEASE / 4) =>
                {
                    self.write(format_args!("rel {} leave", one.op));
                    let _ = one.guard.leave_to_lease();
                }
                3..9 => {
                    self.write(format_args!("rel {} drop", one.op));
                    drop(one.guard);
                }
                9 => {
                    // an unlock that is dropped midway still releases
                    let time = self.between(0, 2_000);
                    self.write(format_args!("rel {} cut", one.op));
                    let _ = timeout(time, one.guard.unlock()).await;
                }
                _ => self.unlock(one).await,
            }
        }
    }

    async fn unlock(&self, held: Held) {
        self.write(format_args!("rel {} unlock", held.op));
        let outcome = held.guard.unlock().await;
        self.write(format_args!("end {} {}", held.op, result(&outcome)));
    }

    /// Leaves a hold to its lease, and its owner's name to any task that releases it.
    fn leave(&mut self, held: Held) {
        let what = format!("{}#{}", self.process.name, held.op);
        self.write(format_args!("rel {} leave", held.op));
        let owner = held.guard.leave_to_lease();
        let process = &self.process;
        process
            .mailbox
            .give(&what, &held.choice.names[0], &owner)
            .expect("a mailbox");
        let (history, mailbox) = (Arc::clone(&process.history), process.mailbox.clone());
        self.given.spawn(handover::look_after(
            history,
            mailbox,
            held.choice,
            what,
            owner,
        ));
    }

    /// Releases a hold that another task left to its lease, through a lock of its own.
    async fn take_given(&mut self) {
        let Some(given) = self.process.mailbox.take() else {
            return;
        };
        let kind = given
            .lock
            .split(':')
            .next()
            .and_then(|kind| Kind::named(kind).ok())
            .expect("a lock of ours");
        let names = vec![given.lock.clone()];
        let choice = Choice::open(
            &self.client.servers,
            kind,
            names,
            Class::Alone,
            false,
            self.client.watchdog,
        );
        let op = self.process.op().to_string();
        handover::release(
            &self.process.history,
            &choice.expect("a good name"),
            &given,
            &op,
            &self.name,
        )
        .await;
    }
}
