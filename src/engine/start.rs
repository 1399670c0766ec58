//! Starts a client: its thread, its connections, and the tasks that run on it.
//!
//! The thread has a current-thread runtime of its own. Renewals must survive a user's runtime whose
//! workers are blocked, and a guard must be released after that runtime has ended. The thread ends
//! when the last client, lock and guard are gone and the janitor is done. The drop of that last
//! handle waits up to 500 ms for releases in flight, because they would be lost if the process
//! ended next.

#[cfg(feature = "metrics")]
use std::sync::PoisonError;
use std::{
    future::Future,
    io,
    sync::{Arc, atomic::AtomicU32},
    thread,
    time::Duration,
};

use nestlock_wire::{Sink, Wire, has_io_here, log};
use tokio::{
    runtime::{Builder, Handle},
    sync::{
        Semaphore,
        mpsc::{self, UnboundedReceiver},
        oneshot,
    },
};

use super::{
    begin::Beginning,
    core::{Anchor, Core, NOTES_AT_ONCE},
    hold::registry::Holds,
    janitor,
    jobs::Janitor,
    retry::Retry,
    wait::{
        lists, messages,
        subscriptions::{ChannelEvent, Subscriptions},
    },
    watchdog,
};

use crate::{
    error::{Error, Result},
    options::Config,
    owner::{ClientId, connection_name},
    store::{ConnectOptions, Endpoint, Store},
    sync::atomic::AtomicBool,
};

/// First and longest pause between attempts at the first connection. The first attempt is
/// immediate; calls made in the meantime wait.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// Starts the client's thread and connects. While the runtime that first polls this future runs, it
/// reads the replies.
pub(crate) async fn connect(endpoint: Endpoint, config: Config) -> Result<Arc<Anchor>> {
    let starting = Starting::here(endpoint, config)?;
    let (tell, told) = oneshot::channel();
    let end = starting.thread(move |runtime| drop(tell.send(runtime)))?;
    let core = starting.core(told.await.ok())?;
    let connecting = Arc::clone(&core);
    // The caller's runtime may lack timers or sockets; the client's own has both.
    let connected = core
        .runtime
        .spawn(async move { connecting.connect().await })
        .await;
    connected.unwrap_or(Err(Error::Closed))?;
    Ok(Arc::new(Anchor {
        core,
        end: Some(end),
    }))
}

/// Starts the client's thread. It connects when the client is first used.
pub(crate) fn connect_lazy(endpoint: Endpoint, config: Config) -> Result<Arc<Anchor>> {
    let starting = Starting::here(endpoint, config)?;
    let (tell, told) = std::sync::mpsc::sync_channel(1);
    let end = starting.thread(move |runtime| drop(tell.send(runtime)))?;
    let core = starting.core(told.recv().ok())?;
    let beginning = Arc::clone(&core);
    core.runtime
        .spawn(async move { connect_when_wanted(&beginning).await });
    Ok(Arc::new(Anchor {
        core,
        end: Some(end),
    }))
}

/// The runtime of a client's thread, or why it could not be built.
type Started = io::Result<Handle>;

/// A validated configuration, before the client's thread is started.
struct Starting {
    endpoint: Endpoint,
    config: Config,
    /// The caller's runtime, if it can read the replies.
    driver: Option<Handle>,
}

impl Starting {
    fn here(endpoint: Endpoint, config: Config) -> Result<Self> {
        let is_read_here = || endpoint.wire(&config) == Wire::Own && has_io_here();
        let driver = Handle::try_current().ok().filter(|_| is_read_here());
        Ok(Self {
            endpoint,
            config: config.validate()?,
            driver,
        })
    }

    /// Starts the thread and passes its runtime to `tell`. The thread runs until the returned
    /// sender is dropped.
    fn thread(&self, tell: impl FnOnce(Started) + Send + 'static) -> Result<oneshot::Sender<()>> {
        let (end, ended) = oneshot::channel::<()>();
        // Build and drop the runtime on that thread: tokio panics if a runtime is dropped inside
        // another one.
        let body = move || match Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => {
                tell(Ok(runtime.handle().clone()));
                let _ = runtime.block_on(ended);
                runtime.shutdown_background();
            }
            Err(error) => tell(Err(error)),
        };
        let started = thread::Builder::new().name("nestlock".into()).spawn(body);
        started
            .map(|_| end)
            .map_err(|error| self.endpoint.without_a_thread(&error))
    }

    /// Builds the core. `None` means that the thread has ended: tokio panics if no file descriptor
    /// is left for a runtime's signal driver.
    fn core(self, started: Option<Started>) -> Result<Arc<Core>> {
        let panicked = || Err(io::Error::other("it panicked: Too many open files?"));
        match started.unwrap_or_else(panicked) {
            Ok(runtime) => Ok(core(self, &runtime)),
            Err(error) => Err(self.endpoint.without_a_thread(&error)),
        }
    }
}

fn core(
    Starting {
        endpoint,
        config,
        driver,
    }: Starting,
    runtime: &Handle,
) -> Arc<Core> {
    let (subscriptions, events) = Subscriptions::new();
    let subscriptions = Arc::new(subscriptions);
    let hears = Arc::downgrade(&subscriptions);
    let sink: Sink = Arc::new(move |heard| {
        if let Some(subscriptions) = hears.upgrade() {
            messages::deliver(&subscriptions, heard);
        }
    });
    let client = ClientId::random();
    let name = connection_name(config.application.as_deref(), &client).into();
    let store = Store::new(ConnectOptions {
        endpoint,
        config: config.clone(),
        name,
        own: runtime.clone(),
        driver,
        sink,
        epochs: Arc::default(),
    });
    let (signals, lists) = Subscriptions::new();
    let (janitor, list) = Janitor::new();
    let (relays, relayed) = mpsc::unbounded_channel();
    let core = Arc::new(Core {
        client,
        holds: Holds::new(config.command_timeout(), config.meter),
        config,
        store,
        beginning: Beginning::default(),
        subscriptions,
        signals,
        janitor,
        relays,
        owner_locks_taken: AtomicU32::new(0),
        runtime: runtime.clone(),
        note_slots: Semaphore::new(NOTES_AT_ONCE),
        notes_refused: AtomicBool::new(false),
        closed: AtomicBool::new(false),
    });
    runtime.spawn(janitor::run(Arc::clone(&core), list));
    runtime.spawn(janitor::expire_relays(Arc::clone(&core), relayed));
    runtime.spawn(go_on(Arc::clone(&core), events, lists));
    core
}

/// Waits until a connection is wanted, then connects, and retries until that succeeds.
async fn connect_when_wanted(core: &Core) {
    let mut retry = Retry::new(PAUSES.0, PAUSES.1);
    loop {
        core.beginning.wanted().await;
        match core.connect().await {
            Ok(()) => return,
            Err(why) => core.beginning.failed(why),
        }
        tokio::time::sleep(retry.next()).await;
    }
}

/// Starts the tasks that need a connection, once there is one.
async fn go_on(
    core: Arc<Core>,
    events: UnboundedReceiver<ChannelEvent>,
    lists: UnboundedReceiver<ChannelEvent>,
) {
    core.beginning.until(|| core.store.is_connected()).await;
    keep_running("watchdog", &core, watchdog::run);
    tokio::spawn(messages::subscribe(Arc::clone(&core), events));
    tokio::spawn(lists::read(Arc::clone(&core), lists));
    #[cfg(feature = "metrics")]
    tokio::spawn(gauge(core));
}

/// Restarts a task if it panics: one bad hold must not cost the others their renewal.
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
            log::later!(ERROR, name = name, error = error; "a task of the lock client panicked; restarting it");
            // Pause: a task that panics at once must not spin.
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
}

/// Updates the gauges as often as the watchdog renews.
#[cfg(feature = "metrics")]
async fn gauge(core: Arc<Core>) {
    let gauges = Arc::new(std::sync::Mutex::new(crate::meter::Gauges::default()));
    let period = core.config.watchdog_timeout / 3;
    loop {
        let (core, gauges) = (Arc::clone(&core), Arc::clone(&gauges));
        // A recorder is user code and there may be many holds: keep both off this thread.
        log::tell(move || {
            // The recorder may have been installed after the program began.
            crate::meter::describe();
            gauges
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .set(core.levels());
        });
        tokio::time::sleep(period).await;
    }
}
