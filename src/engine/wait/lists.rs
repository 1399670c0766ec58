//! Wakes waiters by list elements. One extra connection runs one BLPOP at a time for all lists of
//! this client. The wait queues belong to [`Subscriptions`](super::subscriptions::Subscriptions).
//!
//! Each element wakes one waiter, in any process, and lives for a while after the release, so a
//! waiter need not listen before its first attempt. If no waiter is left for a popped element, the
//! client pushes it again.
//!
//! A BLPOP is renewed after each element and every 5 s, which also detects a dead connection. Its
//! cost grows with the lists: above 200, most name only those with an event in the last second, and
//! all are popped every 50 to 250 ms, without waiting. An element in a list of the client's own,
//! the bell, ends a BLPOP early: unlike CLIENT UNBLOCK it cannot come too early, and it needs no
//! further permission.
//!
//! A list whose only waiter was woken is left out until a waiter sleeps again: the next element is
//! for another process. After a reconnect all waiters try once, as an element may be lost with the
//! connection. A list that refuses BLPOP (ACL, another type) is left out, and its waiters poll.

use std::{collections::HashMap, sync::Arc, time::Duration};

use nestlock_wire::{Epoch, clock::Instant, log};
use tokio::{sync::mpsc, time::sleep};

use super::{
    queue::WaitQueue,
    subscriptions::{ChannelEvent, LINGER, LISTEN_AGAIN, remove_abandoned},
};

use crate::{
    engine::core::Core,
    error::{StoreError, StoreErrorKind},
};

/// Timeout of a BLPOP. A connection that died silently is detected a little later.
const WAIT: Duration = Duration::from_secs(5);
/// Timeout of a BLPOP that only checks whether a list may be popped. Redis 6 reads 1 ms as 0, which
/// means no timeout.
const PROBE_TIMEOUT: Duration = Duration::from_millis(10);
/// Up to this many lists, every BLPOP names all of them.
const FEW: usize = 200;
/// How long a list counts as busy after its last event. With many lists, most BLPOPs name only the
/// busy ones.
const BUSY: Duration = Duration::from_secs(1);
/// How often all lists are polled while most BLPOPs name only the busy ones: interval per list,
/// shortest and longest interval.
const LOOKS: (Duration, Duration, Duration) = (
    Duration::from_micros(25),
    Duration::from_millis(50),
    Duration::from_millis(250),
);

/// Pops elements and wakes their waiters until the client ends.
pub(crate) async fn read(core: Arc<Core>, events: mpsc::UnboundedReceiver<ChannelEvent>) {
    let mut reader = Popper::new(core, events);
    while reader.wait_until_wanted().await {
        match reader.pop().await {
            Ok(Some(queue)) => reader.deliver(&queue),
            Ok(None) => {}
            Err(error) if error.kind().is_denied() || error.kind() == StoreErrorKind::WrongType => {
                reader.drop_refused().await;
            }
            Err(error) => reader.recover(error).await,
        }
    }
}

pub(super) struct Popper {
    core: Arc<Core>,
    events: mpsc::UnboundedReceiver<ChannelEvent>,
    /// The lists to pop, with their wait queues.
    pub(super) wanted: HashMap<Arc<str>, Arc<WaitQueue>>,
    abandoned: Vec<(Instant, Arc<WaitQueue>)>,
    /// A list of this client's own. An element there ends a BLPOP that does not name all wanted
    /// lists.
    bell: Option<Arc<str>>,
    /// Lists with a recent event, and when it happened.
    busy: HashMap<Arc<str>, Instant>,
    /// When a BLPOP last covered all lists.
    last_poll: Instant,
    /// The connection of the last BLPOP.
    epoch: Option<Epoch>,
}

/// The parameters of one BLPOP.
struct BlpopCall {
    asked: HashMap<Arc<str>, Arc<WaitQueue>>,
    /// When the client ends it by the bell. `None`: only if other lists are wanted.
    until: Option<Instant>,
}

impl Popper {
    pub(super) fn new(core: Arc<Core>, events: mpsc::UnboundedReceiver<ChannelEvent>) -> Self {
        Self {
            core,
            events,
            wanted: HashMap::new(),
            abandoned: Vec::new(),
            bell: None,
            busy: HashMap::new(),
            last_poll: Instant::now(),
            epoch: None,
        }
    }

    /// Waits until a list is wanted. Returns `false` if the client has ended.
    pub(super) async fn wait_until_wanted(&mut self) -> bool {
        loop {
            while let Ok(event) = self.events.try_recv() {
                self.take_in(event);
            }
            self.forget_abandoned();
            self.wanted
                .retain(|_, queue| !queue.stop_unless_more_than(0));
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
                () = grace(&self.abandoned), if !self.abandoned.is_empty() => {}
            }
        }
    }

    /// Waits for an element of any list and returns its wait queue. Handles events while it waits.
    /// Returns `None` if the BLPOP timed out or was ended by the bell, or if the client has ended.
    async fn pop(&mut self) -> Result<Option<Arc<WaitQueue>>, StoreError> {
        let core = Arc::clone(&self.core);
        let link = core.store.lists().await?;
        // The shutdown may have run before this link was made.
        if core.check_open().is_err() {
            link.abandon();
        }
        // Elements may have been lost with the old connection, or pushed while there was none.
        let epoch = link.epoch();
        if self
            .epoch
            .replace(epoch)
            .is_some_and(|before| before != epoch)
        {
            core.signals.wake_all();
        }
        // The BLPOP may pop an element for a waiter that leaves after it was sent. `asked` keeps
        // that waiter's queue, so that the element can be handed back.
        let BlpopCall { asked, until } = self.next_call();
        // The server pops the first list that has an element. The most recently busy lists come
        // last: otherwise a lock that is handed over all the time would starve the others until
        // their elements expire.
        let mut lists: Vec<Arc<str>> = asked.keys().cloned().collect();
        lists.sort_by_cached_key(|list| self.busy.get(list).copied());
        let any = lists.first().or(self.wanted.keys().next());
        let bell = self.bell.get_or_insert_with(|| {
            format!(
                "{}:{}",
                any.map_or("", |list| &**list),
                core.client.as_str()
            )
            .into()
        });
        lists.push(Arc::clone(bell));
        let mut ring = self
            .wanted
            .values()
            .next()
            .and_then(|queue| queue.awaited.lock()?.ring(bell, WAIT));
        let popped = link.pop(&lists, WAIT);
        tokio::pin!(popped);
        loop {
            let changed = tokio::select! {
                biased;
                popped = &mut popped => {
                    if asked.len() >= self.wanted.len() {
                        self.last_poll = Instant::now();
                    }
                    // A newer wait queue may have replaced the one in `asked`.
                    return Ok(popped?.and_then(|list| self.wanted.get(&list).or(asked.get(&list)).cloned()));
                }
                event = self.events.recv() => match event {
                    Some(event) => self.take_in(event),
                    None => return Ok(None),
                },
                () = grace(&self.abandoned), if !self.abandoned.is_empty() => self.forget_abandoned(),
                () = sleep(until.unwrap_or(self.last_poll).saturating_duration_since(Instant::now())), if until.is_some() && ring.is_some() => true,
            };
            if changed && let Some(call) = ring.take() {
                let core = Arc::clone(&core);
                tokio::spawn(async move {
                    // A lost ring costs only time, as a lost signal does.
                    if let Err(error) = core.store.signal(&call).await {
                        log::later!(DEBUG, error = error; "cannot end a BLPOP early");
                    }
                });
            }
        }
    }

    /// Returns the lists that the next BLPOP names. A BLPOP costs the server time for each list and
    /// ends after one element. So if only a few of many lists are busy, most BLPOPs name only
    /// those, and all lists are polled now and then. An element of another list can wait: by
    /// default it lives for 1 s.
    fn next_call(&mut self) -> BlpopCall {
        let now = Instant::now();
        self.busy
            .retain(|_, since| now.saturating_duration_since(*since) < BUSY);
        let wanted = self.wanted.len();
        let every = (LOOKS.0 * u32::try_from(wanted).unwrap_or(u32::MAX)).clamp(LOOKS.1, LOOKS.2);
        if wanted <= FEW || self.busy.is_empty() || self.busy.len() > wanted / 4 {
            return BlpopCall {
                asked: self.wanted.clone(),
                until: None,
            };
        }
        if now >= self.last_poll + every {
            return BlpopCall {
                asked: self.wanted.clone(),
                // A poll: the bell ends this BLPOP at once.
                until: Some(now),
            };
        }
        let busy = self
            .busy
            .keys()
            .filter_map(|list| self.wanted.get_key_value(list));
        let asked = busy
            .map(|(list, queue)| (Arc::clone(list), Arc::clone(queue)))
            .collect();
        BlpopCall {
            asked,
            until: Some(self.last_poll + every),
        }
    }

    /// Applies an event. Returns whether it added a list.
    fn take_in(&mut self, event: ChannelEvent) -> bool {
        match event {
            ChannelEvent::Subscribe(queue) => {
                self.busy.insert(Arc::clone(&queue.channel), Instant::now());
                self.wanted
                    .insert(Arc::clone(&queue.channel), queue)
                    .is_none()
            }
            ChannelEvent::LastWaiterLeft(queue) => {
                if queue.take_unclaimed() {
                    self.hand_back(&queue);
                }
                self.abandoned.push((Instant::now(), queue));
                false
            }
        }
    }

    /// Removes the lists whose waiters have not come back. Returns whether any of them was wanted.
    fn forget_abandoned(&mut self) -> bool {
        let before = self.wanted.len();
        for list in remove_abandoned(&self.core.signals, &mut self.abandoned) {
            self.wanted.remove(&*list);
        }
        self.wanted.len() < before
    }

    /// Wakes one waiter of the queue. If none is left, hands the element back.
    pub(super) fn deliver(&mut self, queue: &Arc<WaitQueue>) {
        self.busy.insert(Arc::clone(&queue.channel), Instant::now());
        // If the woken waiter is the only one, stop listening: it will have the lock, so further
        // elements would be for other processes. Stop before waking it: it may retry, fail and wait
        // again before this task continues.
        if queue.stop_unless_more_than(1) {
            self.wanted.remove(&queue.channel);
        }
        if queue.waiters() == 0 {
            self.hand_back(queue);
        } else {
            queue.wake_one();
        }
    }

    /// Pushes the element again in the background, if the lock is free, for a waiter of any
    /// process.
    fn hand_back(&self, queue: &WaitQueue) {
        let Some(call) = queue.awaited.lock().and_then(|lock| lock.signal()) else {
            return;
        };
        let core = Arc::clone(&self.core);
        tokio::spawn(async move {
            if let Err(error) = core.store.signal(&call).await {
                log::later!(DEBUG, error = error; "cannot push a signal back; waiters poll");
            }
        });
    }

    /// Drops the lists that the server refuses to pop. Their waiters poll instead. If it refuses
    /// the bell, drops all lists.
    async fn drop_refused(&mut self) {
        for (list, queue) in self.wanted.clone() {
            match self.pop_from(&list).await {
                Ok(Some(_)) => self.deliver(&queue),
                Ok(None) => {}
                Err(error) => {
                    log::later!(WARN, list = list, error = error; "BLPOP of this list failed; its waiters poll");
                    self.wanted.remove(&list);
                }
            }
        }
        if let Some(bell) = self.bell.take()
            && let Err(error) = self.pop_from(&bell).await
        {
            log::later!(WARN, list = bell, error = error; "BLPOP of this list failed; the waiters of all lists poll");
            self.wanted.clear();
        }
    }

    async fn pop_from(&self, list: &Arc<str>) -> Result<Option<Arc<str>>, StoreError> {
        self.core
            .store
            .lists()
            .await?
            .pop(&[Arc::clone(list)], PROBE_TIMEOUT)
            .await
    }

    /// Recovers from an error. Returns at once if there is a newer connection, otherwise after a
    /// pause.
    async fn recover(&mut self, error: StoreError) {
        if self.core.check_open().is_err() {
            return;
        }
        log::later!(DEBUG, error = error; "BLPOP failed; retrying");
        let Ok(link) = self.core.store.lists().await else {
            return sleep(LISTEN_AGAIN).await;
        };
        if error.kind() == StoreErrorKind::Timeout {
            link.reset().await;
        }
        if self.epoch != Some(link.epoch()) {
            return;
        }
        sleep(LISTEN_AGAIN).await;
        // The failed BLPOP may have popped an element, which is then lost.
        if error.may_have_executed() {
            self.core.signals.wake_all();
        }
    }
}

fn grace(left: &[(Instant, Arc<WaitQueue>)]) -> tokio::time::Sleep {
    sleep(left.first().map_or(LINGER, |(since, _)| {
        (*since + LINGER).saturating_duration_since(Instant::now())
    }))
}
