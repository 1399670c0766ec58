//! What happens between calls: the client's own thread with its connections, hub, watchdog and janitor.

pub(crate) mod acquire;
pub(crate) mod holds;
mod hub;
mod janitor;
mod kind;
mod signals;
pub(crate) mod together;
mod watchdog;

use std::{
    fmt,
    future::Future,
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use tokio::{
    runtime::{Builder, Handle},
    sync::{MutexGuard, Notify, oneshot},
    time::Sleep,
};
use uuid::Uuid;

use self::{
    holds::{Agreement, Hold, Holds, Leftover, Ticket},
    hub::Hub,
};
pub(crate) use self::{
    janitor::Janitor,
    kind::{Kind, Request, Sibling, Together, Wake},
};
use crate::{
    error::{Error, LossReason, Result, StoreError, StoreErrorKind},
    options::{AcquireOptions, Config, ENDLESS, checked_lease},
    owner::{ClientId, OwnerId},
    store::{Call, Endpoint, Forced, Guarded, Inspected, Renewed, Store},
};

/// Everything that one client shares between its handles, its guards and its own thread.
pub(crate) struct Core {
    pub(crate) client: ClientId,
    pub(crate) config: Config,
    pub(crate) store: Store,
    pub(crate) holds: Holds,
    /// Channels, and who waits for their messages.
    hub: Hub,
    /// The same for lists and their elements.
    signals: Hub,
    pub(crate) janitor: Janitor,
    /// Tells the watchdog of a hold that it must look at before its next pass.
    sooner: Notify,
    runtime: Handle,
    closed: AtomicBool,
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core")
            .field("client", &self.client.as_str())
            .field("store", &self.store)
            .finish_non_exhaustive()
    }
}

/// Keeps the client's thread alive: held by clients, locks and guards. The last one ends it.
#[derive(Debug)]
pub(crate) struct Anchor {
    core: Arc<Core>,
    end: Option<oneshot::Sender<()>>,
}

impl Deref for Anchor {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.core
    }
}

impl Drop for Anchor {
    fn drop(&mut self) {
        let (core, end) = (Arc::clone(&self.core), self.end.take());
        // dropped guards may still be on the janitor's list
        self.core.runtime.spawn(async move {
            let _ = tokio::time::timeout(core.settling_time(), core.janitor.idle()).await;
            core.closed.store(true, Ordering::Release);
            core.store.close().await;
            drop(end);
        });
    }
}

/// Starts the client's thread and connects.
pub(crate) async fn connect(endpoint: Endpoint, config: Config, driver: Option<Handle>) -> Result<Arc<Anchor>> {
    let config = config.validate()?;
    let no_thread = |error: std::io::Error| Error::InvalidConfig { reason: format!("cannot start a thread: {error}") };
    let runtime = Builder::new_current_thread().enable_all().build().map_err(no_thread)?;
    let handle = runtime.handle().clone();
    let (end, ended) = oneshot::channel::<()>();
    thread::Builder::new()
        .name("nestlock".into())
        .spawn(move || {
            let _ = runtime.block_on(ended);
            runtime.shutdown_background();
        })
        .map_err(no_thread)?;
    let started = handle.spawn(start(endpoint, config, handle.clone(), driver));
    let core = started.await.unwrap_or(Err(Error::Closed))?;
    Ok(Arc::new(Anchor { core, end: Some(end) }))
}

async fn start(endpoint: Endpoint, config: Config, runtime: Handle, driver: Option<Handle>) -> Result<Arc<Core>> {
    let driver = driver.unwrap_or_else(|| runtime.clone());
    let store = Store::connect(&endpoint, &config, &runtime, driver).await?;
    let (hub, subscriptions) = Hub::new();
    let (signals, lists) = Hub::new();
    let (janitor, list) = Janitor::new();
    let core = Arc::new(Core {
        client: ClientId::random(),
        config,
        store,
        holds: Holds::default(),
        hub,
        signals,
        janitor,
        sooner: Notify::new(),
        runtime: runtime.clone(),
        closed: AtomicBool::new(false),
    });
    tokio::spawn(janitor::run(Arc::clone(&core), list));
    keep_running("watchdog", &core, watchdog::run);
    keep_running("message reader", &core, |core| async move {
        hub::read(&core.hub, core.store.subscriptions()).await;
    });
    let subscriber = Arc::clone(&core);
    tokio::spawn(async move { hub::subscribe(&subscriber.hub, subscriber.store.subscriptions(), subscriptions).await });
    tokio::spawn(signals::read(Arc::clone(&core), lists));
    Ok(core)
}

/// Starts a task again should it ever panic: one bad hold must not cost the others their renewal.
fn keep_running<F>(name: &'static str, core: &Arc<Core>, task: fn(Arc<Core>) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let core = Arc::clone(core);
    tokio::spawn(async move {
        while let Err(error) = tokio::spawn(task(Arc::clone(&core))).await {
            if error.is_cancelled() {
                return;
            }
            tracing::error!(name, %error, "a task of the lock client panicked; starting it again");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
}

impl Core {
    fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) { Err(Error::Closed) } else { Ok(()) }
    }

    /// A timer of the client's own runtime: the caller's may have none, or a paused clock.
    pub(crate) fn sleep_until(&self, at: Instant) -> Sleep {
        let _context = self.runtime.enter();
        tokio::time::sleep_until(at.into())
    }

    /// Who acquires: the one door at which identity is resolved.
    fn resolve(&self, kind: &Arc<dyn Kind>, options: &AcquireOptions) -> Result<OwnerId> {
        if let Some(value) = &options.rare().value {
            let refuse = |reason| Err(Error::InvalidOwner { owner: value.clone(), reason });
            if !kind.takes_values() {
                return refuse("this kind of lock records tasks; acquire as an owner, or use a string lock");
            }
            return match OwnerId::from_value(value)? {
                owner if owner.is_value() => Ok(owner),
                _ => refuse("it reads as a client's task; use another text"),
            };
        }
        match &options.rare().owner {
            None => Ok(OwnerId::current(&self.client)),
            Some(owner) if owner.is_of(&self.client) => Ok(owner.clone()),
            Some(owner) => Err(Error::InvalidOwner {
                owner: owner.to_string(),
                reason: "it belongs to another client, which alone knows its hold count; \
                         here it can be released or extended, not acquired as",
            }),
        }
    }

    /// How long a hold lasts that was acquired without a lease, if nobody renews it.
    fn default_lease(&self, kind: &Arc<dyn Kind>) -> Duration {
        if kind.is_endless() { ENDLESS } else { self.config.watchdog_timeout }
    }

    /// How long a settlement may take while the server answers.
    fn settling_time(&self) -> Duration {
        2 * self.config.command_timeout() + Duration::from_millis(100)
    }

    /// The turn of a hold; no timer where it is free. Whoever has it may be a future that nobody polls any more.
    async fn turn<'h>(&self, hold: &'h Hold, limit: Instant) -> Result<MutexGuard<'h, ()>, StoreError> {
        if let Ok(turn) = hold.turn.try_lock() {
            return Ok(turn);
        }
        tokio::select! {
            biased;
            turn = hold.turn.lock() => Ok(turn),
            () = self.sleep_until(limit) => Err(StoreError::new(
                StoreErrorKind::Overloaded,
                false,
                "another call of this owner is under way; is its future polled?",
            )),
        }
    }

    /// Looks after a hold that its user is done with. Call with a handle that is not used again.
    pub(crate) fn tidy(&self, hold: &Arc<Hold>) {
        match hold.leftover() {
            Leftover::Held => {}
            Leftover::Doubt => self.janitor.settle(hold),
            Leftover::Nothing => self.holds.reap(hold),
        }
    }

    /// Gives up one hold, and waits until the server knows. Dropped midway, the janitor goes on.
    pub(crate) async fn release(&self, hold: Arc<Hold>, ticket: Option<Ticket>) -> Result<()> {
        let under_way = UnderWay { core: self, hold };
        let hold = &under_way.hold;
        // before the first await: from here on it is neither renewed nor relied on
        let generation = hold.leave(ticket)?;
        self.released(hold, generation, Instant::now() + self.config.command_timeout()).await
    }

    /// Waits until the server knows that a generation of this hold was given up.
    async fn released(&self, hold: &Hold, generation: u64, budget: Instant) -> Result<()> {
        let mut pause = Duration::from_millis(5);
        loop {
            let error = match self.turn(hold, budget).await {
                Ok(_turn) => match hold.agree(self).await {
                    Agreement::Reached { held: true } => return hold.check_released(generation),
                    Agreement::Reached { held: false } => return Err(hold.lost_error(LossReason::RecordMissing)),
                    Agreement::Refused(error) | Agreement::Silent(error) => error,
                },
                Err(error) => error,
            };
            if !error.is_transient() || Instant::now() + pause > budget {
                return Err(store_error(hold.lock_name(), error));
            }
            self.sleep_until(Instant::now() + pause).await;
            tokio::select! {
                () = self.store.link(hold.lock_name()).wait_up() => {}
                () = self.sleep_until(budget) => {}
            }
            pause *= 2;
        }
    }

    /// Gives up one hold without waiting.
    pub(crate) fn release_later(&self, hold: &Arc<Hold>, ticket: Ticket) {
        let _ = hold.leave(Some(ticket)); // lost already: nothing to give up
        self.tidy(hold);
    }

    /// Gives up one hold of an owner, without a guard.
    pub(crate) async fn release_owner(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) -> Result<()> {
        self.check_open()?;
        if let Some(hold) = self.holds.get(kind, owner) {
            return self.release(hold, None).await;
        }
        let not_held = || Error::NotHeld { lock: kind.name().to_string(), owner: owner.to_string() };
        if owner.is_of(&self.client) {
            return Err(not_held());
        }
        // handed over by another client: the count is in the record only
        let holds = match self.inspect(kind).await? {
            Inspected::Held { holders, .. } => {
                let holder = holders.into_iter().find(|(holder, _)| holder == owner);
                holder.map(|(_, holds)| holds).ok_or_else(not_held)?
            }
            _ => return Err(not_held()),
        };
        match self.store.release(kind.release(owner, holds - 1)).await {
            Ok(crate::store::Released::NotHeld) => Err(not_held()),
            Ok(_) => Ok(()),
            Err(error) => Err(store_error(kind.name(), error)),
        }
    }

    /// Lets a hold live for at least `lease` from now. `false`: the owner does not hold the lock.
    pub(crate) async fn extend(&self, kind: &Arc<dyn Kind>, owner: &OwnerId, lease: Duration) -> Result<bool> {
        self.check_open()?;
        let lease = checked_lease(kind.name(), lease)?;
        let known = self.holds.get(kind, owner).map(|hold| UnderWay { core: self, hold });
        let current = known.as_ref().and_then(|known| Some((&known.hold, known.hold.generation()?)));
        if current.is_none() && owner.is_of(&self.client) {
            return Ok(false);
        }
        let name = current.map_or_else(|| owner.clone(), |(hold, _)| hold.owner());
        let (sent, answer) = watchdog::extend(self, kind, &name, lease).await;
        let answer = answer.map_err(|error| store_error(kind.name(), error))?;
        if let Some((hold, generation)) = current {
            hold.renewed(generation, answer, sent, lease, None);
            if hold.generation() != Some(generation) {
                return Ok(false); // it ended before the answer came
            }
        }
        match answer {
            Renewed::Yes => Ok(true),
            Renewed::Endless => Err(Error::NotExpirable { lock: kind.name().to_string(), owner: name.to_string() }),
            Renewed::Gone | Renewed::Taken => Ok(false),
            Renewed::Unknown => Err(store_error(kind.name(), silent("the server refused the renewal"))),
        }
    }

    /// Frees a lock, whoever holds it. `false`: nobody did.
    pub(crate) async fn force_unlock(&self, kind: &Arc<dyn Kind>) -> Result<bool> {
        self.check_open()?;
        // who holds it now; a hold that begins meanwhile is not ours to end
        let ours: Vec<_> = self.holds.of_lock(kind).into_iter().map(|hold| UnderWay { core: self, hold }).collect();
        let generations: Vec<_> = ours.iter().map(|ours| ours.hold.generation()).collect();
        match self.store.force_release(kind.force_release()).await {
            Ok(Forced::Freed) => {
                for (ours, generation) in ours.iter().zip(generations) {
                    if let Some(generation) = generation {
                        ours.hold.lose_generation(generation, LossReason::RecordMissing);
                    }
                }
                Ok(true)
            }
            Ok(Forced::WasFree) => Ok(false),
            Ok(Forced::WrongKind) => Err(Error::WrongLockKind { lock: kind.name().to_string() }),
            Err(error) => Err(store_error(kind.name(), error)),
        }
    }

    /// Frees all locks whose records are at keys of this pattern, as [`Core::force_unlock`] does; returns how many were
    /// held. `kind_of`: the lock of a record.
    pub(crate) async fn force_unlock_all(
        &self,
        pattern: &str,
        kind_of: impl Fn(&str) -> Option<Arc<dyn Kind>>,
    ) -> Result<u64> {
        let (mut cursor, mut freed) = ("0".to_owned(), 0);
        loop {
            self.check_open()?;
            let page = self.store.scan(&cursor, pattern).await.map_err(|error| store_error(pattern, error))?;
            let kinds: Vec<_> = page.keys.iter().filter_map(|key| kind_of(key)).collect();
            for outcome in join_all(kinds.iter().map(|kind| self.force_unlock(kind))).await {
                match outcome {
                    Ok(held) => freed += u64::from(held),
                    // no record any more
                    Err(Error::WrongType { .. }) => {}
                    Err(error) => return Err(error),
                }
            }
            match page.next {
                Some(next) => cursor = next,
                None => return Ok(freed),
            }
        }
    }

    /// Asks the server who holds a lock.
    pub(crate) async fn inspect(&self, kind: &Arc<dyn Kind>) -> Result<Inspected> {
        self.check_open()?;
        match self.store.inspect(kind.inspect()).await {
            Ok(Inspected::WrongKind) => Err(Error::WrongLockKind { lock: kind.name().to_string() }),
            Ok(inspected) => Ok(inspected),
            Err(error) => Err(store_error(kind.name(), error)),
        }
    }

    /// Asks the server how often an owner holds a lock.
    pub(crate) async fn hold_count(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) -> Result<u32> {
        Ok(match self.inspect(kind).await? {
            Inspected::Held { holders, .. } => {
                holders.into_iter().find(|(holder, _)| holder.base() == owner.base()).map_or(0, |(_, holds)| holds)
            }
            _ => 0,
        })
    }

    /// Reads or writes a guarded key, showing `token`. One request, which is not repeated.
    pub(crate) async fn guarded(&self, token: u64, call: Call) -> Result<Option<Vec<u8>>> {
        self.check_open()?;
        let key = call.keys.first().map_or_else(String::new, ToString::to_string);
        match self.store.guarded(call).await {
            Ok(Guarded::Done(value)) => Ok(value),
            Ok(Guarded::Stale { seen }) => Err(Error::StaleToken { key, token, seen }),
            Err(error) => Err(store_error(&key, error)),
        }
    }

    /// Waits until nothing is left to settle.
    pub(crate) async fn idle(&self) {
        self.janitor.idle().await;
    }

    /// Turns waiters away, releases what is held, and ends the connections.
    pub(crate) async fn shutdown(&self) -> Result<()> {
        self.closed.store(true, Ordering::Release);
        self.hub.close();
        self.signals.close();
        let mut held = Vec::new();
        self.holds.for_each(|hold| held.push(Arc::clone(hold)));
        for hold in held {
            hold.lose(LossReason::ShutDown);
            hold.leave_queue(self);
            self.tidy(&hold);
        }
        let settled = tokio::select! {
            () = self.janitor.idle() => true,
            () = self.sleep_until(Instant::now() + self.settling_time()) => false,
        };
        let locks = self.janitor.pending();
        self.store.close().await;
        if settled { Ok(()) } else { Err(Error::Unsettled { locks }) }
    }

    /// For tests: holds known, channels subscribed to, settlements pending.
    pub(crate) fn residue(&self) -> (usize, usize, usize) {
        (self.holds.len(), self.hub.channels() + self.signals.channels(), self.janitor.pending())
    }
}

/// A call about a hold. When it ends, or is dropped midway, what it leaves behind is looked after.
struct UnderWay<'a> {
    core: &'a Core,
    hold: Arc<Hold>,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.core.tidy(&self.hold);
    }
}

/// A failure of the store, told as one of this lock.
fn store_error(lock: &str, source: StoreError) -> Error {
    let lock = lock.to_owned();
    match source.kind() {
        StoreErrorKind::WrongType => Error::WrongType { lock },
        _ if source.may_have_executed() => Error::Unconfirmed { lock, source },
        _ => Error::Store { lock, source },
    }
}

fn silent(what: &'static str) -> StoreError {
    StoreError::new(StoreErrorKind::Timeout, true, what)
}

/// A number from 0 to 1, for jitter.
pub(crate) fn random_fraction() -> f64 {
    f64::from(u32::from_le_bytes(*Uuid::new_v4().as_bytes().first_chunk().unwrap_or(&[0; 4]))) / f64::from(u32::MAX)
}
