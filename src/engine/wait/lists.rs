//! Waking waiters by elements of lists: one connection more, over which one BLPOP waits for all lists of this client.
//!
//! An element is for one waiter, of whatever process, and lives for a while after the release: a waiter need not listen
//! before he tries. The gates are the hub's. What was popped and meets no waiter any more is pushed again.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::{sync::mpsc, time::sleep};

use super::{
    gate::Gate,
    hub::{Event, LINGER, LISTEN_AGAIN, remove_left},
};
use crate::{
    clock::Instant,
    engine::{core::Core, kind::Kind},
    error::{StoreError, StoreErrorKind},
    log,
    store::Epoch,
};

/// How long one BLPOP waits: a connection that died in silence is found out a little later.
const WAIT: Duration = Duration::from_secs(5);
/// How long a BLPOP waits that only asks whether a list may be popped from. Redis 6 takes 1 ms for 0, which is for ever.
const ASK: Duration = Duration::from_millis(10);
/// So many lists are always asked for at once.
const FEW: usize = 200;
/// A list at which something happened is asked for alone, with others of its kind, for so long.
const BUSY: Duration = Duration::from_secs(1);
/// Meanwhile all are looked at as often: so long for each list, and at least and at most.
const LOOKS: (Duration, Duration, Duration) =
    (Duration::from_micros(25), Duration::from_millis(50), Duration::from_millis(250));

/// Pops for all who wait, until the client ends.
pub(crate) async fn read(core: Arc<Core>, events: mpsc::UnboundedReceiver<Event>) {
    let mut reader = Reader::new(core, events);
    while reader.wait_until_wanted().await {
        match reader.pop().await {
            Ok(Some(gate)) => reader.deliver(&gate),
            Ok(None) => {}
            Err(error) if error.kind().is_denied() || error.kind() == StoreErrorKind::WrongType => {
                reader.drop_refused().await;
            }
            Err(error) => reader.recover(error).await,
        }
    }
}

pub(super) struct Reader {
    core: Arc<Core>,
    events: mpsc::UnboundedReceiver<Event>,
    /// Whose lists to pop from.
    pub(super) wanted: HashMap<Arc<str>, Arc<Gate>>,
    left: Vec<(Instant, Arc<Gate>)>,
    /// A list of this client's own: an element there ends a BLPOP that has not all lists.
    bell: Option<Arc<str>>,
    /// Lists at which something happened lately, and when.
    busy: HashMap<Arc<str>, Instant>,
    /// When all lists were looked at last.
    looked: Instant,
    /// The connection that was asked last.
    epoch: Option<Epoch>,
}

/// What one BLPOP is about.
struct Round {
    asked: HashMap<Arc<str>, Arc<Gate>>,
    /// When it is to end, though nothing has happened.
    until: Option<Instant>,
}

impl Reader {
    pub(super) fn new(core: Arc<Core>, events: mpsc::UnboundedReceiver<Event>) -> Self {
        Self {
            core,
            events,
            wanted: HashMap::new(),
            left: Vec::new(),
            bell: None,
            busy: HashMap::new(),
            looked: Instant::now(),
            epoch: None,
        }
    }

    /// Sleeps while nobody waits; `false`: the client has ended.
    pub(super) async fn wait_until_wanted(&mut self) -> bool {
        loop {
            while let Ok(event) = self.events.try_recv() {
                self.take_in(event);
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
                event = self.events.recv() => match event {
                    Some(event) => _ = self.take_in(event),
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
        // elements may be lost with a connection, or have come while there was none
        let epoch = link.epoch();
        if self.epoch.replace(epoch).is_some_and(|before| before != epoch) {
            core.signals.wake_all();
        }
        // who leaves meanwhile leaves a BLPOP behind that may pop for him
        let Round { asked, until } = self.round();
        // the server pops of the first that has an element: those at which something happened last come last, else a lock that
        // is handed over all the time keeps signals for others waiting until they are over
        let mut lists: Vec<Arc<str>> = asked.keys().cloned().collect();
        lists.sort_by_cached_key(|list| self.busy.get(list).copied());
        let any = lists.first().or(self.wanted.keys().next());
        let bell = self
            .bell
            .get_or_insert_with(|| format!("{}:{}", any.map_or("", |list| &**list), core.client.as_str()).into());
        lists.push(Arc::clone(bell));
        let mut ring = self.wanted.values().next().and_then(|gate| gate.kind.ring(bell, WAIT));
        let popped = link.pop(&lists, WAIT);
        tokio::pin!(popped);
        loop {
            let changed = tokio::select! {
                biased;
                popped = &mut popped => {
                    if asked.len() >= self.wanted.len() {
                        self.looked = Instant::now();
                    }
                    // somebody else may wait for it by now
                    return Ok(popped?.and_then(|list| self.wanted.get(&list).or(asked.get(&list)).cloned()));
                }
                event = self.events.recv() => match event {
                    Some(event) => self.take_in(event),
                    None => return Ok(None),
                },
                () = grace(&self.left), if !self.left.is_empty() => self.forget_left(),
                () = sleep(until.unwrap_or(self.looked).saturating_duration_since(Instant::now())), if until.is_some() && ring.is_some() => true,
            };
            if changed && let Some(call) = ring.take() {
                let core = Arc::clone(&core);
                tokio::spawn(async move {
                    // lost, it costs as much as a lost signal
                    if let Err(error) = core.store.signal(&call).await {
                        log::later!(DEBUG, error = error; "cannot end a BLPOP");
                    }
                });
            }
        }
    }

    /// Which lists the next BLPOP asks for. One for all of them costs the server time with their number, and is over after
    /// one element: so while there is something going on at a few of many, those are asked for alone, and all are just
    /// looked at now and then. An element elsewhere has time: it lives for a second.
    fn round(&mut self) -> Round {
        let now = Instant::now();
        self.busy.retain(|_, since| now.saturating_duration_since(*since) < BUSY);
        let wanted = self.wanted.len();
        let every = (LOOKS.0 * u32::try_from(wanted).unwrap_or(u32::MAX)).clamp(LOOKS.1, LOOKS.2);
        if wanted <= FEW || self.busy.is_empty() || self.busy.len() > wanted / 4 {
            return Round { asked: self.wanted.clone(), until: None };
        }
        if now >= self.looked + every {
            return Round { asked: self.wanted.clone(), until: Some(now) };
        }
        let busy = self.busy.keys().filter_map(|list| self.wanted.get_key_value(list));
        let asked = busy.map(|(list, gate)| (Arc::clone(list), Arc::clone(gate))).collect();
        Round { asked, until: Some(self.looked + every) }
    }

    /// Whether other lists are wanted now.
    fn take_in(&mut self, event: Event) -> bool {
        match event {
            Event::Subscribe(gate) => {
                self.busy.insert(Arc::clone(&gate.channel), Instant::now());
                self.wanted.insert(Arc::clone(&gate.channel), gate).is_none()
            }
            Event::Left(gate) => {
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
    pub(super) fn deliver(&mut self, gate: &Arc<Gate>) {
        self.busy.insert(Arc::clone(&gate.channel), Instant::now());
        // he will have the lock: what is popped then would be for others. Before he is woken: he may have tried in vain, and
        // be back, before this goes on
        if gate.stop_unless_more_than(1) {
            self.wanted.remove(&gate.channel);
        }
        if gate.waiters() == 0 {
            self.hand_back(&gate.kind);
        } else {
            gate.wake_one();
        }
    }

    /// Tells somebody else.
    fn hand_back(&self, kind: &Arc<dyn Kind>) {
        let (core, Some(call)) = (Arc::clone(&self.core), kind.signal()) else { return };
        tokio::spawn(async move {
            if let Err(error) = core.store.signal(&call).await {
                log::later!(DEBUG, error = error; "cannot hand a signal back; waiters look for themselves");
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
                    log::later!(WARN, list = list, error = error; "cannot wait for this list; waiters poll instead");
                    self.wanted.remove(&list);
                }
            }
        }
        if let Some(bell) = self.bell.take()
            && let Err(error) = self.ask(&bell).await
        {
            log::later!(WARN, list = bell, error = error; "cannot wait for this list; waiters of others poll instead");
            self.wanted.clear();
        }
    }

    async fn ask(&self, list: &Arc<str>) -> Result<Option<Arc<str>>, StoreError> {
        self.core.store.lists().await?.pop(&[Arc::clone(list)], ASK).await
    }

    /// After an error: as soon as there is another connection, if this one broke; else a little later.
    async fn recover(&mut self, error: StoreError) {
        if self.core.check_open().is_err() {
            return;
        }
        log::later!(DEBUG, error = error; "cannot wait for lists; trying again");
        let Ok(link) = self.core.store.lists().await else { return sleep(LISTEN_AGAIN).await };
        if error.kind() == StoreErrorKind::Timeout {
            link.reset().await;
        }
        if self.epoch != Some(link.epoch()) {
            return;
        }
        sleep(LISTEN_AGAIN).await;
        // it may have popped an element all the same
        if error.may_have_executed() {
            self.core.signals.wake_all();
        }
    }
}

fn grace(left: &[(Instant, Arc<Gate>)]) -> tokio::time::Sleep {
    sleep(left.first().map_or(LINGER, |(since, _)| (*since + LINGER).saturating_duration_since(Instant::now())))
}
