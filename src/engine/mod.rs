//! What happens between calls: the client's own thread with its connections, hub, watchdog and janitor.

pub(crate) mod acquire;
mod due;
pub(crate) mod generation;
pub(crate) mod hold;
mod holds;
mod hub;
mod janitor;
mod kind;
mod lease;
pub(crate) mod release;
mod settle;
mod signals;
pub(crate) mod together;
mod watchdog;

use std::{
    fmt,
    future::Future,
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use tokio::{
    runtime::{Builder, Handle},
    sync::{MutexGuard, oneshot},
    time::Sleep,
};
use uuid::Uuid;

use self::{hold::Hold, holds::Holds, hub::Hub};
pub(crate) use self::{
    janitor::Janitor,
    kind::{Kind, Request, Sibling, Together, Wake},
};
use crate::{
    clock::Instant,
    error::{Error, Result, StoreError, StoreErrorKind},
    log,
    options::{AcquireOptions, Config},
    owner::{ClientId, OwnerId},
    store::{Endpoint, Store},
};

/// How long the drop of a client's last handle waits for releases that are under way: a process that ends next would take
/// them along.
const CLOSING: Duration = Duration::from_millis(500);

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
    pub(crate) round_trip: RoundTrip,
    /// The server refused the last renewals as a whole.
    renewals_are_refused: AtomicBool,
    runtime: Handle,
    /// Whether a runtime of the user's drives the connection.
    is_driven: bool,
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
    /// The client's thread goes on until what was dropped is released. If anything is under way, this waits for it, for
    /// [`CLOSING`] at most: perhaps the process is about to end.
    fn drop(&mut self) {
        let (core, end) = (Arc::clone(&self.core), self.end.take());
        let under_way = self.core.janitor.pending() > 0;
        let (settled, told) = mpsc::sync_channel(1);
        self.core.runtime.spawn(async move {
            let _ = tokio::time::timeout(core.settling_time(), core.janitor.idle()).await;
            let _ = settled.try_send(());
            core.closed.store(true, Ordering::Release);
            core.store.close().await;
            drop(end);
        });
        // the thread that drives the connection cannot wait for an answer
        let drives = self.core.is_driven || Handle::try_current().is_ok_and(|here| here.id() == self.core.runtime.id());
        if under_way && !drives {
            let _ = told.recv_timeout(CLOSING);
        }
    }
}

/// How long a request takes: at least as long as the last one, and not much less than those before.
#[derive(Debug)]
pub(crate) struct RoundTrip(AtomicU64);

impl RoundTrip {
    fn new(first: Duration) -> Self {
        Self(AtomicU64::new(u64::try_from(first.as_micros()).unwrap_or(u64::MAX)))
    }

    /// A future that is polled late takes its answer late: one sample counts for twice of what is known at most.
    pub(crate) fn take(&self, sample: Duration) {
        const NEW: u64 = 40_000;
        let known = self.0.load(Ordering::Relaxed);
        let sample = u64::try_from(sample.as_micros()).unwrap_or(u64::MAX).min(known.saturating_mul(2) + NEW);
        self.0.store(if sample >= known { sample } else { known - (known - sample) / 8 }, Ordering::Relaxed);
    }

    /// With a quarter more: they vary.
    pub(crate) fn get(&self) -> Duration {
        let micros = self.0.load(Ordering::Relaxed);
        Duration::from_micros(micros.saturating_add(micros / 4))
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
    let is_driven = driver.is_some();
    let driver = driver.unwrap_or_else(|| runtime.clone());
    let store = Store::connect(&endpoint, &config, &runtime, driver).await?;
    let asked = Instant::now();
    let answered = store.link("").barrier().await.is_ok();
    let round_trip = RoundTrip::new(if answered { asked.elapsed() } else { Duration::ZERO });
    let (hub, subscriptions) = Hub::new();
    let (signals, lists) = Hub::new();
    let (janitor, list) = Janitor::new();
    let core = Arc::new(Core {
        client: ClientId::random(),
        holds: Holds::new(config.command_timeout()),
        config,
        store,
        hub,
        signals,
        janitor,
        round_trip,
        renewals_are_refused: AtomicBool::new(false),
        runtime: runtime.clone(),
        is_driven,
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
            log::later!(ERROR, name = name, error = error; "a task of the lock client panicked; starting it again");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
}

impl Core {
    fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) { Err(Error::Closed) } else { Ok(()) }
    }

    /// From here on nothing begins, and nobody waits.
    fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.hub.close();
        self.signals.close();
    }

    /// A timer of the client's own runtime: the caller's may have none, or a paused clock.
    pub(crate) fn sleep_until(&self, at: Instant) -> Sleep {
        let _context = self.runtime.enter();
        tokio::time::sleep(at.saturating_duration_since(Instant::now()))
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

    /// When a hold is over that was acquired a moment ago without a lease, if nobody renews it.
    fn default_end(&self, kind: &Arc<dyn Kind>) -> Instant {
        if kind.is_endless() { Instant::NEVER } else { Instant::now() + self.config.watchdog_timeout }
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
