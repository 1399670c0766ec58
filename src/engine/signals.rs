//! Waking waiters by elements of lists: one connection more, over which one BLPOP waits for all lists of this client.
//!
//! An element is for one waiter, of whatever process, and lives for a while after the release: a waiter need not listen
//! before he tries. The gates are the hub's. What was popped and meets no waiter any more is pushed again.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{
    sync::mpsc,
    time::{sleep, sleep_until, timeout},
};

use super::{
    Core, Kind,
    hub::{GRACE, Gate, RETRY, Request, remove_left},
};
use crate::error::{StoreError, StoreErrorKind};

/// How long one BLPOP waits: a connection that died in silence is found out a little later.
const WAIT: Duration = Duration::from_secs(5);
/// How long a BLPOP waits that only asks whether a list may be popped from.
const ASK: Duration = Duration::from_millis(1);

/// Pops for all who wait, until the client ends.
pub(crate) async fn read(core: Arc<Core>, requests: mpsc::UnboundedReceiver<Request>) {
    let mut reader = Reader { core, requests, wanted: HashMap::new(), left: Vec::new(), bell: None };
    while reader.wait_until_wanted().await {
        match reader.pop().await {
            Ok(Some(gate)) => reader.deliver(&gate),
            Ok(None) => {}
            Err(error) if matches!(error.kind(), StoreErrorKind::NoPermission | StoreErrorKind::WrongType) => {
                reader.drop_refused().await;
            }
            Err(error) => reader.recover(error).await,
        }
    }
}

struct Reader {
    core: Arc<Core>,
    requests: mpsc::UnboundedReceiver<Request>,
    /// Whose lists to pop from.
    wanted: HashMap<Arc<str>, Arc<Gate>>,
    left: Vec<(Instant, Arc<Gate>)>,
    /// A list of this client's own: an element there ends a BLPOP that has not all lists.
    bell: Option<Arc<str>>,
}

impl Reader {
    /// Sleeps while nobody waits; `false`: the client has ended.
    async fn wait_until_wanted(&mut self) -> bool {
        loop {
            while let Ok(request) = self.requests.try_recv() {
                self.take_in(request);
            }
            self.forget_left();
            self.wanted.retain(|_, gate| !gate.stop_unless_more_than(0));
            if self.core.check_open().is_err() {
                return false;
            }
            if !self.wanted.is_empty() {
                return true;
            }
            tokio::select! {
                request = self.requests.recv() => match request {
                    Some(request) => _ = self.take_in(request),
                    None => return false,
                },
                () = grace(&self.left), if !self.left.is_empty() => {}
            }
        }
    }

    /// Waits for an element of any list, and returns its gate; takes in meanwhile who comes and goes.
    async fn pop(&mut self) -> Result<Option<Arc<Gate>>, StoreError> {
        let core = Arc::clone(&self.core);
        let link = core.store.lists().await?;
        if core.check_open().is_err() {
            link.abandon();
        }
        // who leaves meanwhile leaves a BLPOP behind that may pop for him
        let asked = self.wanted.clone();
        let mut lists: Vec<Arc<str>> = asked.keys().cloned().collect();
        let bell = self.bell.get_or_insert_with(|| format!("{}:{}", lists[0], core.client.as_str()).into());
        lists.push(Arc::clone(bell));
        let bell = Arc::clone(bell);
        let popped = link.pop(&lists, WAIT);
        tokio::pin!(popped);
        let mut rung = false;
        loop {
            let changed = tokio::select! {
                popped = &mut popped => return Ok(popped?.and_then(|list| asked.get(&list).cloned())),
                request = self.requests.recv() => match request {
                    Some(request) => self.take_in(request),
                    None => return Ok(None),
                },
                () = grace(&self.left), if !self.left.is_empty() => self.forget_left(),
            };
            if changed && !std::mem::replace(&mut rung, true) {
                let (core, bell) = (Arc::clone(&core), Arc::clone(&bell));
                tokio::spawn(async move {
                    // lost, it costs as much as a lost signal
                    if let Err(error) = core.store.push(&bell, WAIT).await {
                        tracing::debug!(%error, "cannot end a BLPOP");
                    }
                });
            }
        }
    }

    /// Whether other lists are wanted now.
    fn take_in(&mut self, request: Request) -> bool {
        match request {
            Request::Subscribe(gate) => self.wanted.insert(Arc::clone(&gate.channel), gate).is_none(),
            Request::Left(gate) => {
                if gate.take_unheard() {
                    self.hand_back(&gate.kind);
                }
                self.left.push((Instant::now(), gate));
                false
            }
        }
    }

    /// Whether lists that nobody came back to were wanted until now.
    fn forget_left(&mut self) -> bool {
        let before = self.wanted.len();
        for list in remove_left(&self.core.signals, &mut self.left) {
            self.wanted.remove(&*list);
        }
        self.wanted.len() < before
    }

    /// Wakes one waiter.
    fn deliver(&mut self, gate: &Arc<Gate>) {
        if gate.waiters() == 0 {
            self.hand_back(&gate.kind);
        } else {
            gate.wake_one();
        }
        // he will have the lock: what is popped then would be for others
        if gate.stop_unless_more_than(1) {
            self.wanted.remove(&gate.channel);
        }
    }

    /// Tells somebody else.
    fn hand_back(&self, kind: &Arc<dyn Kind>) {
        let (core, Some(call)) = (Arc::clone(&self.core), kind.signal()) else { return };
        tokio::spawn(async move {
            if let Err(error) = core.store.signal(call).await {
                tracing::debug!(%error, "cannot hand a signal back; waiters look for themselves");
            }
        });
    }

    /// Leaves out the lists that refuse to be popped from, whose waiters poll.
    async fn drop_refused(&mut self) {
        for (list, gate) in self.wanted.clone() {
            match self.ask(&list).await {
                Ok(Some(_)) => self.deliver(&gate),
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(%list, %error, "cannot wait for this list; waiters poll instead");
                    self.wanted.remove(&list);
                }
            }
        }
        if let Some(bell) = self.bell.take()
            && let Err(error) = self.ask(&bell).await
        {
            tracing::warn!(list = %bell, %error, "cannot wait for this list; waiters of others poll instead");
            self.wanted.clear();
        }
    }

    async fn ask(&self, list: &Arc<str>) -> Result<Option<Arc<str>>, StoreError> {
        self.core.store.lists().await?.pop(&[Arc::clone(list)], ASK).await
    }

    /// After an error: where the connection broke, elements may be lost with it, and all look once.
    async fn recover(&mut self, error: StoreError) {
        if self.core.check_open().is_err() {
            return;
        }
        tracing::debug!(%error, "cannot wait for lists; trying again");
        let broke = error.may_have_executed() || error.kind() == StoreErrorKind::Unavailable;
        match self.core.store.lists().await {
            Ok(link) if broke => {
                if error.kind() == StoreErrorKind::Timeout {
                    link.reset().await;
                }
                if timeout(WAIT, link.wait_up()).await.is_ok() {
                    self.core.signals.wake_all();
                }
            }
            _ => sleep(RETRY).await,
        }
    }
}

fn grace(left: &[(Instant, Arc<Gate>)]) -> tokio::time::Sleep {
    sleep_until(left.first().map_or_else(Instant::now, |(since, _)| *since + GRACE).into())
}
