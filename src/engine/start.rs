//! Starts a client: its thread, its connections, and the tasks that run there.

#[cfg(feature = "metrics")]
use std::sync::PoisonError;
use std::{
    future::Future,
    sync::{Arc, atomic::AtomicU32},
    thread,
    time::Duration,
};

use tokio::{
    runtime::{Builder, Handle},
    sync::{mpsc, oneshot},
};

use super::{
    core::{Anchor, Core},
    holds::Holds,
    janitor,
    jobs::Janitor,
    wait::{hub::Hub, lists, messages},
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

/// Starts the client's thread and connects. The runtime in which this is polled first reads answers, while it runs.
pub(crate) async fn connect(endpoint: Endpoint, config: Config) -> Result<Arc<Anchor>> {
    let is_read_here = || endpoint.wire(&config) == Wire::Own && has_io_here();
    let driver = Handle::try_current().ok().filter(|_| is_read_here());
    let config = config.validate()?;
    let no_thread = |error: std::io::Error| endpoint.without_a_thread(&error);
    let ((end, ended), (tell, told)) = (oneshot::channel::<()>(), oneshot::channel());
    // the runtime is made and dropped there: it must not be dropped here, where another one may run
    let body = move || match Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => {
            let _ = tell.send(Ok(runtime.handle().clone()));
            let _ = runtime.block_on(ended);
            runtime.shutdown_background();
        }
        Err(error) => drop(tell.send(Err(error))),
    };
    thread::Builder::new().name("nestlock".into()).spawn(body).map_err(no_thread)?;
    // tokio panics where a runtime has no file descriptor for signals
    let panicked = |_| no_thread(std::io::Error::other("it panicked; Too many open files?"));
    let handle = told.await.map_err(panicked)?.map_err(no_thread)?;
    let started = handle.spawn(start(endpoint, config, handle.clone(), driver));
    let core = started.await.unwrap_or(Err(Error::Closed))?;
    Ok(Arc::new(Anchor { core, end: Some(end) }))
}

async fn start(endpoint: Endpoint, config: Config, runtime: Handle, driver: Option<Handle>) -> Result<Arc<Core>> {
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
    let store = Store::connect(Dials::new(endpoint, config.clone(), name, runtime.clone(), driver, sink)).await?;
    // how long a round trip takes is known from here on. If it is not answered, the first request will be told
    store.barrier().await;
    let (signals, lists) = Hub::new();
    let (janitor, list) = Janitor::new();
    let (relays, relayed) = mpsc::unbounded_channel();
    let core = Arc::new(Core {
        client,
        holds: Holds::new(config.command_timeout(), config.meter),
        config,
        store,
        hub,
        signals,
        janitor,
        relays,
        turns: AtomicU32::new(0),
        runtime: runtime.clone(),
        closed: AtomicBool::new(false),
    });
    tokio::spawn(janitor::run(Arc::clone(&core), list));
    tokio::spawn(janitor::mind_relays(Arc::clone(&core), relayed));
    keep_running("watchdog", &core, watchdog::run);
    tokio::spawn(messages::subscribe(Arc::clone(&core), subscriptions));
    tokio::spawn(lists::read(Arc::clone(&core), lists));
    #[cfg(feature = "metrics")]
    tokio::spawn(gauge(Arc::clone(&core)));
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
