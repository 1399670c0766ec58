//! Random histories of each lock kind, checked against a small model on a server. A failing history
//! shrinks to the shortest one.

use std::{
    cell::{Cell, RefCell},
    time::{Duration, Instant},
};

use nestlock::{Error, Lock, LockClient, LockGuard};
use proptest::{
    prelude::{Just, Strategy, prop_oneof},
    test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner},
};

use crate::{
    cancel::poll_times,
    support::{
        Server,
        wire::{Reply, Wire},
    },
};

/// Histories per kind on a real server. The embedded server runs a tenth of them.
const CASES: u32 = 10_000;
const OWNERS: usize = 3;

/// The sides of a lock. Only a read-write lock has both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Write,
    Read,
}

use Side::{Read, Write};

#[derive(Debug, Clone, Copy)]
enum Op {
    TryLock(usize, Side),
    Unlock(usize, Side),
    /// Drops a guard.
    Drop(usize, Side),
    /// Drops a waiting acquire after some polls.
    Cancel(usize, Side, u32),
    ForceUnlock(usize, Side),
    /// All leases end, and the clients do not know it yet.
    Expire,
}

type Door = fn(&LockClient, &str, Side) -> Lock;

#[derive(Clone, Copy)]
struct Kind {
    name: &'static str,
    door: Door,
    reentrant: bool,
    two_sides: bool,
    /// The record is a string that names the owner.
    string: bool,
}

fn ops(kind: Kind) -> impl Strategy<Value = Vec<Op>> {
    let side = if kind.two_sides {
        prop_oneof![Just(Write), Just(Read)].boxed()
    } else {
        Just(Write).boxed()
    };
    let who = || 0..OWNERS;
    let op = prop_oneof![
        6 => (who(), side.clone()).prop_map(|(who, side)| Op::TryLock(who, side)),
        4 => (who(), side.clone()).prop_map(|(who, side)| Op::Unlock(who, side)),
        1 => (who(), side.clone()).prop_map(|(who, side)| Op::Drop(who, side)),
        2 => (who(), side.clone(), 1..5_u32).prop_map(|(who, side, polls)| Op::Cancel(who, side, polls)),
        1 => (who(), side).prop_map(|(who, side)| Op::ForceUnlock(who, side)),
        1 => Just(Op::Expire),
    ];
    proptest::collection::vec(op, 1..14)
}

/// The holds of one owner on one side.
#[derive(Default)]
struct Holding {
    guards: Vec<LockGuard>,
    /// The hold count that the server records.
    recorded: u32,
}

impl Holding {
    /// Counts the holds that the client believes to be valid.
    fn believed(&self) -> usize {
        self.guards.iter().filter(|guard| !guard.is_lost()).count()
    }

    /// Returns true if a guard is known to be lost: its owner is still inside the lost hold.
    fn is_inside_a_loss(&self) -> bool {
        self.guards.iter().any(LockGuard::is_lost)
    }

    /// Returns true if the record is gone and the client does not know it.
    fn is_stale(&self) -> bool {
        self.believed() > 0 && self.recorded == 0
    }
}

struct Owner {
    client: LockClient,
    locks: [Lock; 2],
    holdings: [Holding; 2],
}

struct World<'a> {
    kind: Kind,
    wire: &'a RefCell<Wire>,
    name: String,
    owners: Vec<Owner>,
}

/// The expected outcome of an acquire.
#[derive(Debug, PartialEq)]
enum Expected {
    Acquired,
    Busy,
    Lost,
    NotReentrant,
    UpgradeRefused,
}

impl World<'_> {
    fn holding(&mut self, who: usize, side: Side) -> &mut Holding {
        &mut self.owners[who].holdings[side as usize]
    }

    fn expected(&self, who: usize, side: Side) -> Expected {
        let own = &self.owners[who].holdings;
        let (mine, other) = (&own[side as usize], &own[1 - side as usize]);
        if mine.is_inside_a_loss()
            || side == Read && mine.believed() == 0 && other.is_inside_a_loss()
        {
            Expected::Lost
        } else if mine.believed() > 0 && !self.kind.reentrant {
            Expected::NotReentrant
        } else if side == Write && mine.believed() == 0 && own[Read as usize].believed() > 0 {
            Expected::UpgradeRefused
        } else if mine.is_stale() {
            Expected::Lost
        } else {
            let others = || {
                self.owners
                    .iter()
                    .enumerate()
                    .filter(|(other, _)| *other != who)
                    .map(|(_, owner)| owner)
            };
            let writes = others().any(|owner| owner.holdings[Write as usize].recorded > 0);
            let reads = self
                .owners
                .iter()
                .any(|owner| owner.holdings[Read as usize].recorded > 0);
            let blocked = writes || side == Write && reads && mine.recorded == 0;
            if blocked {
                Expected::Busy
            } else {
                Expected::Acquired
            }
        }
    }

    fn take_in(
        &mut self,
        who: usize,
        side: Side,
        outcome: Result<Option<LockGuard>, Error>,
    ) -> Expected {
        match outcome {
            Ok(Some(guard)) => {
                let holding = self.holding(who, side);
                holding.guards.push(guard);
                holding.recorded += 1;
                Expected::Acquired
            }
            Ok(None) => Expected::Busy,
            Err(Error::Lost { .. }) => Expected::Lost,
            Err(Error::NotReentrant { .. }) => Expected::NotReentrant,
            Err(Error::UpgradeRefused { .. }) => Expected::UpgradeRefused,
            Err(error) => panic!("{error}"),
        }
    }

    async fn play(&mut self, op: Op) -> Result<(), TestCaseError> {
        match op {
            Op::TryLock(who, side) => {
                let expected = match self.expected(who, side) {
                    // These errors say that a wait would never end. A try does not wait, so the
                    // lock is busy.
                    Expected::NotReentrant | Expected::UpgradeRefused => Expected::Busy,
                    expected => expected,
                };
                let outcome = self.owners[who].locks[side as usize].try_lock().await;
                let found = self.take_in(who, side, outcome);
                proptest::prop_assert_eq!(found, expected);
            }
            Op::Unlock(who, side) => {
                let stale = self.holding(who, side).is_stale();
                let Some(guard) = self.holding(who, side).guards.pop() else {
                    return Ok(());
                };
                let lost = stale || guard.is_lost();
                let outcome = guard.unlock().await;
                let told = matches!(outcome, Err(Error::Lost { .. }));
                proptest::prop_assert_eq!(told, lost, "{:?}", outcome);
                proptest::prop_assert_eq!(outcome.is_ok(), !lost);
                self.holding(who, side).recorded -= u32::from(!lost);
            }
            Op::Drop(who, side) => {
                let stale = self.holding(who, side).is_stale();
                let Some(guard) = self.holding(who, side).guards.pop() else {
                    return Ok(());
                };
                let lost = stale || guard.is_lost();
                drop(guard);
                self.owners[who].client.idle().await;
                self.holding(who, side).recorded -= u32::from(!lost);
            }
            Op::Cancel(who, side, polls) => {
                // What the client finds out about a stale hold depends on how far the acquire came.
                if self.holding(who, side).is_stale() {
                    return Ok(());
                }
                let expected = self.expected(who, side);
                let lock = self.owners[who].locks[side as usize].clone();
                if let Some(outcome) = poll_times(lock.lock(), polls).await {
                    let found = self.take_in(who, side, outcome.map(Some));
                    proptest::prop_assert_eq!(&found, &expected);
                    if found == Expected::Acquired {
                        drop(self.holding(who, side).guards.pop());
                        self.holding(who, side).recorded -= 1;
                    }
                }
                self.owners[who].client.idle().await;
            }
            Op::ForceUnlock(who, side) => {
                let held = |side: Side| {
                    self.owners
                        .iter()
                        .any(|owner| owner.holdings[side as usize].recorded > 0)
                };
                // A writer may also read. While the write side is held, `force_unlock` of the read
                // side frees nothing.
                let expected = held(side) && (side == Write || !held(Write));
                let freed = self.owners[who].locks[side as usize].force_unlock().await;
                proptest::prop_assert_eq!(freed.unwrap(), expected);
                if expected {
                    self.forget_records();
                }
            }
            Op::Expire => {
                for key in self.call(&["KEYS", "*"]).list() {
                    if !key.text().starts_with("redisson_lock_token:") {
                        self.call(&["DEL", key.text()]);
                    }
                }
                self.forget_records();
            }
        }
        self.check()
    }

    fn forget_records(&mut self) {
        self.owners
            .iter_mut()
            .flat_map(|owner| &mut owner.holdings)
            .for_each(|holding| holding.recorded = 0);
    }

    /// Checks that the server records what the model says, and nothing else.
    fn check(&self) -> Result<(), TestCaseError> {
        let reply = if self.kind.string {
            match self.call(&["GET", &format!("lock:{}", self.name)]) {
                Reply::Nil => Reply::List(vec![]),
                owner => Reply::List(vec![owner, Reply::Text("1".into())]),
            }
        } else {
            self.call(&["HGETALL", &self.name])
        };
        let mut recorded = Vec::new();
        for pair in reply
            .list()
            .chunks(2)
            .filter(|pair| pair[0].text() != "mode")
        {
            let field = pair[0].text();
            let (owner, side) = match field.strip_suffix(":write") {
                Some(owner) => (owner, Write),
                None if self.kind.two_sides => (field, Read),
                None => (field, Write),
            };
            // Strips the suffix that an unknown outcome adds to the owner id.
            let base = owner.split('.').next().unwrap_or_default();
            let who = self
                .owners
                .iter()
                .position(|owner| owner.client.current_owner().as_str() == base);
            recorded.push((
                who.expect("one of ours"),
                side as usize,
                pair[1].text().parse::<u32>().unwrap(),
            ));
        }
        recorded.sort_unstable();
        let mut expected = Vec::new();
        for (who, owner) in self.owners.iter().enumerate() {
            for (side, holding) in owner
                .holdings
                .iter()
                .enumerate()
                .filter(|(_, holding)| holding.recorded > 0)
            {
                expected.push((who, side, holding.recorded));
                proptest::prop_assert_eq!(
                    holding.believed(),
                    holding.recorded as usize,
                    "owner {} knows better",
                    who
                );
            }
        }
        proptest::prop_assert_eq!(recorded, expected);
        Ok(())
    }

    fn call(&self, parts: &[&str]) -> Reply {
        self.wire.borrow_mut().call(parts).unwrap()
    }
}

fn check(kind: Kind) {
    let server = Server::start();
    let cases = if server.is_real() { CASES } else { CASES / 10 };
    let wire = RefCell::new(server.wire());
    let call = |parts: &[&str]| wire.borrow_mut().call(parts).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let clients: Vec<LockClient> = runtime.block_on(async {
        // A cancelled waiter gets a few polls. With a short cap, it polls the lock within them.
        let client = || server.client_with(|c| c.poll_cap(Duration::from_millis(3)));
        futures::future::join_all((0..OWNERS).map(|_| client())).await
    });
    let config = Config {
        cases,
        failure_persistence: None,
        max_shrink_iters: 2000,
        ..Config::default()
    };
    let mut runner =
        TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let number = Cell::new(0_u32);
    let outcome = runner.run(&ops(kind), |ops| {
        number.set(number.get() + 1);
        let name = format!("{}:{}", kind.name, number.get());
        runtime.block_on(async {
            // A failed history leaves holds and keys behind.
            for client in &clients {
                client.idle().await;
            }
            call(&["FLUSHALL"]);
            let owner = |client: &LockClient| Owner {
                client: client.clone(),
                locks: [Write, Read].map(|side| (kind.door)(client, &name, side)),
                holdings: Default::default(),
            };
            let owners = clients.iter().map(owner).collect();
            let mut world = World {
                kind,
                wire: &wire,
                name: name.clone(),
                owners,
            };
            for (at, op) in ops.iter().enumerate() {
                let played = world.play(*op).await;
                played
                    .map_err(|error| TestCaseError::fail(format!("step {at}, {op:?}: {error}")))?;
            }
            drop(world);
            for client in &clients {
                client.idle().await;
            }
            call(&["DEL", &format!("redisson_lock_token:{{{name}}}")]);
            let start = Instant::now();
            while call(&["DBSIZE"]).int() > 0 {
                // A signal may come late. It must have a TTL, so that it expires by itself.
                let signals = call(&["KEYS", "lock-signal:*"]);
                for key in signals.list() {
                    proptest::prop_assert_ne!(call(&["PTTL", key.text()]), Reply::Int(-1));
                    call(&["DEL", key.text()]);
                }
                let left = !kind.string || start.elapsed() > Duration::from_secs(2);
                proptest::prop_assert!(!left, "something is left");
            }
            Ok(())
        })
    });
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
    println!("{}: {} histories", kind.name, number.get());
}

macro_rules! model {
    ($($test:ident: $door:expr, reentrant = $reentrant:literal, two_sides = $two:literal $(, string = $string:literal)?;)*) => {
        $(
            #[test]
            #[allow(unused_mut, reason = "most records are hashes")]
            fn $test() {
                let name = stringify!($test);
                let mut kind = Kind { name, door: $door, reentrant: $reentrant, two_sides: $two, string: false };
                $(kind.string = $string;)?
                check(kind);
            }
        )*
    };
}

model! {
    reentrant_histories_fit_the_model:
        |client, name, _| client.reentrant_lock(name).unwrap(), reentrant = true, two_sides = false;
    non_reentrant_histories_fit_the_model:
        |client, name, _| client.non_reentrant_lock(name).unwrap(), reentrant = false, two_sides = false;
    spin_histories_fit_the_model:
        |client, name, _| client.spin_lock(name).unwrap(), reentrant = true, two_sides = false;
    signal_histories_fit_the_model:
        |client, name, _| client.signal_lock(name).unwrap(),
        reentrant = false, two_sides = false, string = true;
    fenced_histories_fit_the_model:
        |client, name, _| client.fenced_lock(name).unwrap(), reentrant = true, two_sides = false;
    fair_histories_fit_the_model:
        |client, name, _| client.fair_lock(name).unwrap(), reentrant = true, two_sides = false;
    read_write_histories_fit_the_model:
        |client, name, side| {
            let lock = client.read_write_lock(name).unwrap();
            if side == Read { lock.read_lock() } else { lock.write_lock() }
        },
        reentrant = true, two_sides = true;
}
