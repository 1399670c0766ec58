//! The held thing.

use std::{
    fmt,
    future::{Future, poll_fn},
    sync::Arc,
    task::Poll,
    time::{Duration, Instant},
};

use async_trait::async_trait;

use crate::{
    engine::{Anchor, attempt::Entered, generation::Ticket, hold::Hold},
    error::{Error, LossReason, Result},
    hand_over::HandOver,
    owner::OwnerId,
    token::FencingToken,
};

/// One hold of a lock.
///
/// A guard remembers its owner: it may be moved to, and released by, any task or thread.
///
/// # Release on drop is not immediate
///
/// Dropping works from anywhere (another thread, no runtime, a panic, after the runtime has ended): the client's own
/// thread sends the release a moment later. Await [`LockGuard::unlock`] where the next step relies on it, and to learn
/// whether the lock was still held.
#[must_use = "dropped at once, the lock is released at once"]
#[clippy::has_significant_drop]
pub struct LockGuard {
    inner: Inner,
}

enum Inner {
    One(Single),
    Several(Box<dyn Held>),
}

/// What the guard of several locks holds. When dropped, all of it is released.
#[async_trait]
pub(crate) trait Held: Send + Sync {
    fn name(&self) -> &str;
    fn owner(&self) -> OwnerId;
    fn members(&self) -> &[LockGuard];
    async fn unlock(self: Box<Self>) -> Result<()>;
    async fn lost(&self) -> Error;
    fn remaining(&self) -> Result<Duration>;
    async fn extend(&self, lease: Duration) -> Result<()>;
    /// Lets go of all members.
    fn forget(self: Box<Self>, how: Forget) -> OwnerId;
}

/// What becomes of a hold that is let go of without a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Forget {
    /// It is renewed as before.
    GoOn,
    /// It ends with its lease.
    LeaveToLease,
}

/// One hold of one lock. When dropped, it is released.
struct Single {
    anchor: Arc<Anchor>,
    hold: Arc<Hold>,
    /// Taken when the hold is given up, or left without a guard.
    ticket: Option<Ticket>,
}

impl LockGuard {
    pub(crate) fn new(anchor: Arc<Anchor>, (hold, ticket): Entered) -> Self {
        Self { inner: Inner::One(Single { anchor, hold, ticket: Some(ticket) }) }
    }

    pub(crate) fn of_several(held: impl Held + 'static) -> Self {
        Self { inner: Inner::Several(Box::new(held)) }
    }

    /// The lock's name, with the client's prefix; of a multi-lock, the members' names with `+` between.
    #[must_use]
    pub fn name(&self) -> &str {
        match &self.inner {
            Inner::One(single) => single.hold.lock_name(),
            Inner::Several(held) => held.name(),
        }
    }

    /// Who holds the lock; of a multi-lock or RedLock, its first member.
    #[must_use]
    pub fn owner(&self) -> OwnerId {
        match &self.inner {
            Inner::One(single) => single.owner(),
            Inner::Several(held) => held.owner(),
        }
    }

    /// The guards of a multi-lock's members, in their order; of a RedLock, those that were acquired; of any other lock,
    /// none.
    #[must_use = "the members stay held by this guard"]
    pub fn members(&self) -> &[LockGuard] {
        match &self.inner {
            Inner::One(_) => &[],
            Inner::Several(held) => held.members(),
        }
    }

    /// The fencing token: higher than that of every earlier holder. `None` if the kind has none; see
    /// [`LockClient::fenced_lock`](crate::LockClient::fenced_lock).
    #[must_use]
    pub fn fencing_token(&self) -> Option<FencingToken> {
        match &self.inner {
            Inner::One(single) => {
                let token = single.ticket.as_ref()?.generation.token?;
                Some(FencingToken::recorded(token))
            }
            Inner::Several(_) => None,
        }
    }

    /// How many replicas had this hold before it counted; `None`: none had to, or it was adopted. Counted
    /// up to 255. See [`LockClientBuilder::replicas`](crate::LockClientBuilder::replicas). Of several locks, the least.
    #[must_use]
    pub fn replicas(&self) -> Option<u32> {
        match &self.inner {
            Inner::One(single) => single.ticket.as_ref()?.replicas.map(u32::from),
            Inner::Several(held) => held.members().iter().map(Self::replicas).min().flatten(),
        }
    }

    /// Whether its owner had the lock already.
    pub(crate) fn is_re_entry(&self) -> bool {
        match &self.inner {
            Inner::One(single) => single.ticket.as_ref().is_some_and(|ticket| ticket.generation.books().count > 1),
            Inner::Several(_) => false,
        }
    }

    /// Releases this hold, and waits until the server has done so. A multi-lock releases all members, and reports the
    /// first failure.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if the lock was lost before: what it guarded may have been touched by others.
    /// [`Error::NotHeld`] if the hold was released without this guard. [`Error::Store`] or [`Error::Unconfirmed`] if
    /// the server did not answer within the command timeout: the client goes on releasing in the background, and the
    /// hold is neither renewed nor valid any more.
    ///
    /// # Cancel safety
    ///
    /// Dropped before it is polled, it releases as a dropped guard does. Once polled, the release goes on in the
    /// background when the future is dropped.
    pub async fn unlock(self) -> Result<()> {
        match self.inner {
            Inner::One(mut single) => match single.ticket.take() {
                Some(ticket) => single.anchor.release(&single.hold, ticket).await,
                None => Err(single.hold.not_held_error(&single.owner())),
            },
            Inner::Several(held) => held.unlock().await,
        }
    }

    /// Resolves when the lock is lost, no later than its lease ends on this client's monotonic clock; or when the hold
    /// was released without this guard. Never resolves while the lock is held. For `select!`. A multi-lock is lost with
    /// its first member.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn lost(&self) -> Error {
        match &self.inner {
            Inner::One(single) => single.lost().await,
            Inner::Several(held) => held.lost().await,
        }
    }

    /// Whether the lock is lost. Looks at this client's clock and books only, without a request.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.remaining_or_error().is_err()
    }

    /// How much longer the lock may be relied on without a renewal: the lease, counted from before the request was
    /// sent, less a drift allowance of 1 % + 2 ms. Zero: lost.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.remaining_or_error().unwrap_or(Duration::ZERO)
    }

    /// Until when the lock may be relied on without a renewal: now and [`remaining`](Self::remaining). In the past, or
    /// now: lost. redsync's `Until`.
    #[must_use]
    pub fn valid_until(&self) -> Instant {
        let now = Instant::now();
        now + self.remaining()
    }

    /// How the lock was lost, if it was.
    pub(crate) fn loss(&self) -> Option<LossReason> {
        match self.remaining_or_error() {
            Err(Error::Lost { reason, .. }) => Some(reason),
            _ => None,
        }
    }

    pub(crate) fn remaining_or_error(&self) -> Result<Duration> {
        match &self.inner {
            Inner::One(single) => single.remaining(),
            Inner::Several(held) => held.remaining(),
        }
    }

    /// Lets the lock live for at least `lease` from now: 10 ms to 10 years, never less than it has already.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if the lock was lost; [`Error::InvalidLease`]; [`Error::Store`] and [`Error::Unconfirmed`] if
    /// the server did not answer. The lock stays as it was; of a multi-lock, some members may have been extended.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropped midway, the lock may or may not have been extended.
    pub async fn extend(&self, lease: Duration) -> Result<()> {
        self.remaining_or_error()?;
        match &self.inner {
            Inner::One(single) => {
                let Single { anchor, hold, .. } = single;
                match anchor.extend(hold.kind(), &single.owner(), lease).await {
                    // told below, and how
                    Err(Error::NotHeld { .. }) => {}
                    extended => extended?,
                }
            }
            Inner::Several(held) => held.extend(lease).await?,
        }
        // an extension that was refused has ended the hold
        self.remaining_or_error().map(drop)
    }

    /// Gives the hold away: the lock stays held, and is renewed if it has no lease of its own.
    ///
    /// Release it with [`Lock::release`](crate::Lock::release) and the owner returned, here or in another process. A
    /// nested hold counts as one release, those of the other guards as one each. This client only renews it, as long as it
    /// has a lock, a guard or itself alive: it does not re-enter what it gave away (its next acquire waits for it like
    /// anybody's, under another name), and does not release it at its [`shutdown`](crate::LockClient::shutdown). That it
    /// was released elsewhere is noticed with the next renewal.
    ///
    /// Other guards of the same owner hold the lock on, and are renewed and released as before. While one lives, this owner cannot
    /// take the lock again, since it would wait for itself: a try answers `None`, whatever waits
    /// [`Error::NotReentrant`]. An `unlock` of one of them that is in flight may return [`Error::Unconfirmed`]: its release goes
    /// on in the background.
    ///
    /// If a request about this lock is under way (a nested acquire or release that was dropped a moment ago), or if the
    /// connection broke while one was, less than a lease ago, nobody knows how many holds the server records: then the count
    /// is set once more, and what is not renewed for another guard's sake ends with its TTL at the latest. So that neither
    /// meets the receiver's release, await [`idle`](crate::LockClient::idle) before, and after. Where the connection breaks
    /// while other guards are released, and another release of this owner comes at the same time, holds may stay recorded
    /// until the lease is over: too many, never too few. Of a lock that was lost, nothing is given away.
    ///
    /// A multi-lock lets go of all members; the owner returned is the first member's, and the others' only where all are
    /// of one client.
    #[must_use = "the owner is what the lock can be released with"]
    pub fn forget(self) -> OwnerId {
        self.let_go(Forget::GoOn)
    }

    /// Leaves the lock held until its lease ends, without a renewal, so that a job runs once per interval, over all processes.
    ///
    /// A lock without a lease lasts for what its last renewal gave it, the client's
    /// [`watchdog_timeout`](crate::LockClientBuilder::watchdog_timeout) at most; give it a
    /// [`lease`](crate::AcquireOptions::lease) to say for how long. Until then it is as after [`forget`](Self::forget): the
    /// owner returned can release it. Other guards of the same owner are renewed as before, and the lock with them. A signal
    /// lock without expiry stays until it is released.
    ///
    /// ```no_run
    /// # async fn example(client: nestlock::LockClient) -> nestlock::Result<()> {
    /// use std::time::Duration;
    /// use nestlock::AcquireOptions;
    ///
    /// let once_an_hour = AcquireOptions::new().lease(Duration::from_secs(3600));
    /// if let Some(guard) = client.mutex("report")?.try_lock_with(once_an_hour).await? {
    ///     // write the report
    ///     guard.leave_to_lease();
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn leave_to_lease(self) -> OwnerId {
        self.let_go(Forget::LeaveToLease)
    }

    pub(crate) fn let_go(self, how: Forget) -> OwnerId {
        let owner = self.owner();
        match self.inner {
            Inner::One(mut single) => {
                if let Some(ticket) = single.ticket.take() {
                    if how == Forget::LeaveToLease {
                        ticket.unwatch();
                    }
                    single.anchor.give_away(&single.hold, &ticket);
                }
            }
            Inner::Several(held) => return held.forget(how),
        }
        owner
    }

    /// Hands the lock to another task or process, which has `keep` (10 ms to 10 years) to [`adopt`](crate::Lock::adopt) it.
    ///
    /// From here on this guard holds nothing, and nobody renews the lock: it is held by nobody in particular until it is
    /// adopted, or for `keep`. To take it back, adopt it: there is no other way. Nobody else gets it in between, and it can be adopted once. Who
    /// waits for the lock learns of a shorter time when it next looks, within the
    /// [`poll_cap`](crate::LockClientBuilder::poll_cap); a waiter of Redisson's, which does not look, when the lease is over
    /// that it was told of, or by the release of whoever adopts.
    ///
    /// ```no_run
    /// # async fn example(lock: nestlock::Lock) -> nestlock::Result<()> {
    /// use std::time::Duration;
    ///
    /// let guard = lock.lock().await?;
    /// let job = guard.hand_over(Duration::from_secs(30)).await?.to_text();
    /// // send the text with the job; a worker goes on, under the same lock
    /// # drop(job); Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The guard holds the lock as before after [`Error::CannotHandOver`] (its owner holds it more than once, or reads and
    /// writes, or it is several locks as one) and [`Error::InvalidLease`]. [`Error::Lost`] and [`Error::NotHeld`] as with
    /// [`unlock`](Self::unlock). After [`Error::Store`] and [`Error::Unconfirmed`] see
    /// [`remaining`](Self::remaining): either the guard still holds the lock, or it was given up and is being released, also if
    /// the server has moved it unheard.
    ///
    /// # Cancel safety
    ///
    /// Dropped midway, as after [`Error::Unconfirmed`]: nobody can adopt it, and it is released.
    pub async fn hand_over(&self, keep: Duration) -> Result<HandOver> {
        match &self.inner {
            Inner::One(single) => {
                let Single { anchor, hold, .. } = single;
                let ticket = single.ticket.as_ref().ok_or_else(|| hold.not_held_error(&single.owner()))?;
                let owner = anchor.transfer(hold, ticket, keep).await?;
                Ok(HandOver::new(hold.kind().about().family, hold.lock_name(), owner))
            }
            Inner::Several(held) => Err(Error::CannotHandOver {
                lock: held.name().to_owned(),
                reason: "it is several locks as one; hand over a lock of one kind",
            }),
        }
    }

    /// Runs `future` while the lock is held; when the lock is lost, `future` is dropped.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if the lock was lost before `future` ended.
    ///
    /// # Cancel safety
    ///
    /// As cancel safe as `future`. The guard stays.
    ///
    /// ```no_run
    /// # async fn example(lock: nestlock::Lock) -> nestlock::Result<()> {
    ///
    /// let guard = lock.lock().await?;
    /// let total = guard.run_until_lost(async { 40 + 2 }).await?;
    /// guard.unlock().await?;
    /// # let _ = total; Ok(())
    /// # }
    /// ```
    pub async fn run_until_lost<F: Future>(&self, future: F) -> Result<F::Output> {
        tokio::select! {
            biased;
            error = self.lost() => Err(error),
            output = future => Ok(output),
        }
    }
}

/// Takes over the holds of these guards, if they all are of one client.
pub(crate) fn of_one_client(guards: &mut [LockGuard]) -> Option<(Arc<Anchor>, Vec<Entered>)> {
    let mut singles = Vec::with_capacity(guards.len());
    for guard in guards {
        match &mut guard.inner {
            Inner::One(single) => singles.push(single),
            Inner::Several(_) => return None,
        }
    }
    let anchor = Arc::clone(&singles.first()?.anchor);
    if !singles.iter().all(|single| Arc::ptr_eq(&single.anchor, &anchor)) {
        return None;
    }
    let held = singles.into_iter().filter_map(|single| Some((Arc::clone(&single.hold), single.ticket.take()?)));
    Some((anchor, held.collect()))
}

impl Single {
    fn owner(&self) -> OwnerId {
        self.ticket.as_ref().map_or_else(|| self.hold.owner(), |ticket| ticket.generation.owner.clone())
    }

    fn remaining(&self) -> Result<Duration> {
        self.anchor.check_ours(self.hold.lock_name())?;
        match &self.ticket {
            Some(Ticket { generation, .. }) => {
                generation.remaining().map_err(|end| self.hold.end_error(generation, end))
            }
            None => Err(self.hold.not_held_error(&self.owner())),
        }
    }

    async fn lost(&self) -> Error {
        loop {
            let Some(ticket) = &self.ticket else { return self.hold.not_held_error(&self.owner()) };
            let ended = ticket.generation.ended.notified();
            tokio::pin!(ended);
            ended.as_mut().enable();
            let remaining = match self.remaining() {
                Ok(remaining) => remaining,
                Err(error) => return error,
            };
            tokio::select! {
                () = ended => {}
                () = self.anchor.sleep_until(crate::clock::Instant::now() + remaining) => {}
                // the clock of a fork's timers stands still: polled there, it is looked at once more
                () = poll_fn(|_| if self.anchor.store.is_ours() { Poll::Pending } else { Poll::Ready(()) }) => {}
            }
        }
    }
}

impl Drop for Single {
    fn drop(&mut self) {
        match self.ticket.take() {
            Some(ticket) => self.anchor.release_later(&self.hold, &ticket),
            None => self.anchor.tidy(&self.hold),
        }
    }
}

impl fmt::Debug for LockGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockGuard")
            .field("lock", &self.name())
            .field("owner", &self.owner())
            .field("remaining", &self.remaining())
            .finish_non_exhaustive()
    }
}
