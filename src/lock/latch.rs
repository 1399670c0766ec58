//! A latch: a count that goes down to zero, and then lets all waiters go. Redisson's `RCountDownLatch`.
//!
//! A latch has no holders: see [`Core::wait_for_zero`](crate::engine) for its waiters.

use std::{sync::Arc, time::Duration};

use nestlock_wire::{Arg, Call, clock::Instant};

use super::permits::MOST;

use crate::{
    engine::{Anchor, Awaiting},
    error::{Error, Result},
    keys::{LATCH_CALLERS, LATCH_REQUEST, LockName, request_key},
    options::Wait,
    store::script,
};

script!(COUNT = "latch/count", keys = 1, args = 0);
script!(
    TRY_SET = "latch/try_set",
    parts = ["counter", "once"],
    keys = 3,
    args = 2
);
script!(
    COUNT_DOWN = "latch/count_down",
    parts = ["counter", "once"],
    keys = 3,
    args = 2
);

/// A count that any process lowers, and on whose zero all processes may wait. See
/// [`LockClient::count_down_latch`](crate::LockClient::count_down_latch).
///
/// ```no_run
/// # async fn example(client: nestlock::LockClient) -> nestlock::Result<()> {
/// let ready = client.count_down_latch("run-7:ready")?;
/// ready.try_set_count(3).await?; // one process: after the last count it would begin again
/// ready.count_down().await?; // each of three workers
/// ready.wait().await // until all three have
/// # }
/// ```
///
/// A latch that does not exist has the count zero, so nothing waits for it: set the count before others
/// wait. At zero the latch is deleted, and may be set again; take a new name for each run instead, so
/// that no late `count_down` of the last run counts in the next.
#[derive(Debug, Clone)]
pub struct CountDownLatch {
    anchor: Arc<Anchor>,
    name: Arc<str>,
    callers: Arc<str>,
    channel: Arc<str>,
}

impl CountDownLatch {
    pub(crate) fn new(anchor: &Arc<Anchor>, name: &LockName) -> Self {
        Self {
            anchor: Arc::clone(anchor),
            name: Arc::clone(name.as_arc()),
            callers: name.derived(LATCH_CALLERS),
            // without the colon of other channels
            channel: format!("redisson_countdownlatch__channel__{{{}}}", name.as_arc()).into(),
        }
    }

    /// Returns the name, with the client's prefix.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Says how many are to be counted down, 1 to 2,147,483,647, if that was not said before. Returns
    /// whether it was this call. One request.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidCount`] if `count` is 0 or above that; otherwise as
    /// [`Lock::inspect`](crate::Lock::inspect). After [`Error::Unconfirmed`] the count may have been set,
    /// and even have gone down to zero since: a second call would then set it again.
    ///
    /// # Cancel safety
    ///
    /// If dropped midway, the count may or may not have been set.
    pub async fn try_set_count(&self, count: u32) -> Result<bool> {
        if !(1..=MOST).contains(&count) {
            return Err(Error::InvalidCount {
                lock: self.name().to_owned(),
                reason: format!("a latch cannot count down {count}; use 1 to {MOST}"),
            });
        }
        let args = [count.into(), (&self.channel).into()];
        let call = Call::new(&TRY_SET, self.keys(), args);
        Ok(self.anchor.change_count(&self.name, &call).await? == 1)
    }

    /// Counts one down, and returns how many are left. At zero, all waiters of all processes go on, and
    /// nothing is left to count down. One request.
    ///
    /// # Errors
    ///
    /// As [`Lock::inspect`](crate::Lock::inspect). A request that is repeated within the command timeout
    /// counts once; after [`Error::Unconfirmed`] it may have counted.
    /// [`count_down_as`](Self::count_down_as) may be repeated at any time.
    ///
    /// # Cancel safety
    ///
    /// If dropped midway, it may or may not have counted.
    pub async fn count_down(&self) -> Result<u32> {
        self.lower("").await
    }

    /// Like [`count_down`](Self::count_down), but counts once for each `caller`: for workers that may
    /// be started again before the latch is open.
    ///
    /// The callers are forgotten when nestlock opens the latch or sets its count. Redisson does not
    /// know of them: if its clients open or set the latch, take a new name for each run, and delete
    /// `nestlock_latch_callers:{name}`.
    ///
    /// ```no_run
    /// # async fn example(ready: nestlock::CountDownLatch) -> nestlock::Result<()> {
    /// ready.count_down_as("worker-7").await?;
    /// ready.count_down_as("worker-7").await?; // after a restart: changes nothing
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidOwner`] if `caller` is empty or longer than 256 bytes; otherwise as
    /// [`count_down`](Self::count_down).
    ///
    /// # Cancel safety
    ///
    /// If dropped midway, it may or may not have counted, and may be repeated.
    pub async fn count_down_as(&self, caller: &str) -> Result<u32> {
        if !(1..=256).contains(&caller.len()) {
            return Err(Error::InvalidOwner {
                owner: caller.to_owned(),
                reason: "a caller has 1 to 256 bytes; give it a short name of its own",
            });
        }
        self.lower(caller).await
    }

    async fn lower(&self, caller: &str) -> Result<u32> {
        let args = [Arg::Text(caller.into()), (&self.channel).into()];
        let call = Call::new(&COUNT_DOWN, self.keys(), args);
        self.anchor.change_count(&self.name, &call).await
    }

    /// Returns the count, as the master saw it a moment ago. One request. A replica refuses it, and so
    /// does a master that refuses writes because it has too few replicas or cannot save its data.
    ///
    /// # Errors
    ///
    /// As [`Lock::inspect`](crate::Lock::inspect).
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn count(&self) -> Result<u32> {
        self.anchor.count(&self.name, &self.read()).await
    }

    /// Waits until the count is zero; returns at once if it is, or if the latch does not exist.
    ///
    /// A lost message costs up to the [`poll_cap`](crate::LockClientBuilder::poll_cap), 1 s by default.
    /// A latch that is opened, and set again at once, may keep a waiter that did not look in between. A
    /// server that loses its data opens all latches.
    ///
    /// # Errors
    ///
    /// [`Error::WrongLockKind`] or [`Error::WrongType`] if the key holds something else;
    /// [`Error::Store`] after an outage as long as
    /// [`outage_patience`](crate::LockClientBuilder::outage_patience), from this caller's first look in
    /// it, or if the server refused looks for as long, as [`count`](Self::count); [`Error::Closed`].
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: nothing changes.
    pub async fn wait(&self) -> Result<()> {
        self.wait_until(None).await.map(drop)
    }

    /// Like [`wait`](Self::wait), for at most `wait`, and one last look. Returns whether the count was
    /// zero.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait), but an outage ends no bounded wait; [`Error::Store`] if the server did
    /// not reply in all that time, or cannot be reached at its end. If the last look has no reply within
    /// a round trip and 40 ms, the one before is the answer.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: nothing changes.
    pub async fn wait_for(&self, wait: Duration) -> Result<bool> {
        self.wait_until(Wait::For(wait).until(Instant::now())).await
    }

    async fn wait_until(&self, deadline: Option<Instant>) -> Result<bool> {
        let awaiting = Awaiting {
            name: &self.name,
            channel: &self.channel,
            count: self.read(),
            deadline,
        };
        self.anchor.wait_for_zero(awaiting).await
    }

    fn read(&self) -> Call {
        Call::new(&COUNT, [Arc::clone(&self.name)], [])
    }

    /// Returns the keys of a change, which is made once, even if it is sent twice.
    fn keys(&self) -> [Arc<str>; 3] {
        let request = request_key(&self.callers, LATCH_CALLERS, LATCH_REQUEST);
        [request, Arc::clone(&self.name), Arc::clone(&self.callers)]
    }
}
