//! Starts a client: its thread, its connections, and the tasks that run there.

#[cfg(feature = "metrics")]
use std::sync::PoisonError;
use std::{
    future::Future,
    io,
    sync::{Arc, atomic::AtomicU32},
    thread,
    time::Duration,
};

use tokio::{
    runtime::{Builder, Handle},
    sync::{
        mpsc::{self, UnboundedReceiver},
        oneshot,
    },
};

use super::{
    begin::Beginning,
    core::{Anchor, Core},
    holds::Holds,
    janitor,
    jobs::Janitor,
    retry::Retry,
    wait::{
        hub::{Event, Hub},
        lists, messages,
    },
    watchdog,
};
use crate::{
    error::{Error, Result},
    log,
    options::{Config, Wire},
    owner::{ClientId, connection_name},
    store::{Dials, Endpoint, Sink, Store, has_io_here},
    sync::atomic::AtomicBool,
};

/// The pauses between two tries to connect for the first time, of which the first is at once. Who asks meanwhile waits.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// Starts the client's thread and connects. The runtime in which this is polled first reads answers, while it runs.
pub(crate) async fn connect(endpoint: Endpoint, config: Config) -> Result<Arc<Anchor>> {
    let starting = Starting::here(endpoint, config)?;
    let (tell, told) = oneshot::channel();
    let end = starting.thread(move |runtime| drop(tell.send(runtime)))?;
    let core = starting.core(told.await.ok())?;
    let connecting = Arc::clone(&core);
    // on its own runtime: it has timers and sockets
    let connected = core.runtime.spawn(async move { connecting.connect().await }).await;
    connected.unwrap_or(Err(Error::Closed))?;
    Ok(Arc::new(Anchor { core, end: Some(end) }))
}

/// Starts the client's thread, which connects when the client is used.
pub(crate) fn connect_lazy(endpoint: Endpoint, config: Config) -> Result<Arc<Anchor>> {
    let starting = Starting::here(endpoint, config)?;
    let (tell, told) = std::sync::mpsc::sync_channel(1);
    let end = starting.thread(move |runtime| drop(tell.send(runtime)))?;
    let core = starting.core(told.recv().ok())?;
    let beginning = Arc::clone(&core);
    core.runtime.spawn(async move { connect_when_wanted(&beginning).await });
    Ok(Arc::new(Anchor { core, end: Some(end) }))
}

/// The runtime of a client's thread.
type Started = io::Result<Handle>;

/// A client of which there is nothing yet.
struct Starting {
    endpoint: Endpoint,
    config: Config,
    /// The runtime that reads answers.
    driver: Option<Handle>,
}

impl Starting {
    fn here(endpoint: Endpoint, config: Config) -> Result<Self> {
        let is_read_here = || endpoint.wire(&config) == Wire::Own && has_io_here();
        let driver = Handle::try_current().ok().filter(|_| is_read_here());
        Ok(Self { endpoint, config: config.validate()?, driver })
    }

    /// Starts the thread, which tells its runtime, until what is returned is dropped.
    fn thread(&self, tell: impl FnOnce(Started) + Send + 'static) -> Result<oneshot::Sender<()>> {
        let (end, ended) = oneshot::channel::<()>();
        // the runtime is made and dropped there: it must not be dropped here, where another one may run
        let body = move || match Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => {
                tell(Ok(runtime.handle().clone()));
                let _ = runtime.block_on(ended);
                runtime.shutdown_background();
            }
            Err(error) => tell(Err(error)),
        };
        let started = thread::Builder::new().name("nestlock".into()).spawn(body);
        started.map(|_| end).map_err(|error| self.endpoint.without_a_thread(&error))
    }

    /// `None`: the thread has ended. tokio panics where a runtime has no file descriptor for signals.
    fn core(self, started: Option<Started>) -> Result<Arc<Core>> {
        let panicked = || Err(io::Error::other("it panicked; Too many open files?"));
        match started.unwrap_or_else(panicked) {
            Ok(runtime) => Ok(core(self, &runtime)),
            Err(error) => Err(self.endpoint.without_a_thread(&error)),
        }
    }
}

fn core(Starting { endpoint, config, driver }: Starting, runtime: &Handle) -> Arc<Core> {
    let (hub, subscriptions) = Hub::new();
    let hub = Arc::new(hub);
    let hears = Arc::downgrade(&hub);
    let sink: Sink = Arc::new(move |heard| {
        if let Some(hub) = hears.upgrade() {
            messages::deliver(&hub, heard);
        }
    });
    let client = ClientId::random();
    let name = connection_name(config.application.as_deref(), &client).into();
    let store = Store::new(Dials::new(endpoint, config.clone(), name, runtime.clone(), driver, sink));
    let (signals, lists) = Hub::new();
    let (janitor, list) = Janitor::new();
    let (relays, relayed) = mpsc::unbounded_channel();
    let core = Arc::new(Core {
        client,
        holds: Holds::new(config.command_timeout(), config.meter),
        config,
        store,
        beginning: Beginning::default(),
        hub,
        signals,
        janitor,
        relays,
        turns: AtomicU32::new(0),
        runtime: runtime.clone(),
        closed: AtomicBool::new(false),
    });
    runtime.spawn(janitor::run(Arc::clone(&core), list));
    runtime.spawn(janitor::mind_relays(Arc::clone(&core), relayed));
    runtime.spawn(go_on(Arc::clone(&core), subscriptions, lists));
    core
}

/// Connects as soon as that is wanted, and as often as it takes.
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

/// Starts what needs a connection, once there is one.
async fn go_on(core: Arc<Core>, subscriptions: UnboundedReceiver<Event>, lists: UnboundedReceiver<Event>) {
    core.beginning.until(|| core.store.is_connected()).await;
    keep_running("watchdog", &core, watchdog::run);
    tokio::spawn(messages::subscribe(Arc::clone(&core), subscriptions));
    tokio::spawn(lists::read(Arc::clone(&core), lists));
    #[cfg(feature = "metrics")]
    tokio::spawn(gauge(core));
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

/// Shows levels, as often as the watchdog renews.
#[cfg(feature = "metrics")]
async fn gauge(core: Arc<Core>) {
    let gauges = Arc::new(std::sync::Mutex::new(crate::meter::Gauges::default()));
    let period = core.config.watchdog_timeout / 3;
    loop {
        let (core, gauges) = (Arc::clone(&core), Arc::clone(&gauges));
        // a recorder is the user's code, and there may be many holds
        log::tell(move || {
            // it may have been installed since the program began
            crate::meter::describe();
            gauges.lock().unwrap_or_else(PoisonError::into_inner).set(core.levels());
        });
        tokio::time::sleep(period).await;
    }
}
