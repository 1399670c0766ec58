//! The guard: one hold of a lock, which is released on drop.

use std::{
    fmt,
    future::{Future, poll_fn},
    sync::Arc,
    task::Poll,
    time::{Duration, Instant},
};

use async_trait::async_trait;

use crate::{
    engine::{
        Anchor,
        hold::{Entered, Hold, generation::Ticket},
    },
    error::{Error, LossReason, Result},
    hand_over::HandOver,
    owner::OwnerId,
    token::FencingToken,
};

/// One hold of a lock.
///
/// A guard remembers its owner: any task or thread may receive it and release it.
///
/// # Release on drop is not immediate
///
/// You may drop a guard anywhere (on another thread, without a runtime, in a panic, after the
/// runtime has ended): the client's own thread sends the release a moment later. Await
/// [`LockGuard::unlock`] if the next step relies on the release, and to learn whether the lock was
/// still held.
///
/// ```
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = nestlock_embedded::EmbeddedServer::start()?;
/// # let client = nestlock::LockClient::connect(server.url()).await?;
/// let guard = client.mutex("invoice:7")?.lock().await?;
/// // dropped if the lock is lost
/// let sent = guard.run_until_lost(async { "sent" }).await?;
/// assert_eq!(sent, "sent");
/// assert!(!guard.is_lost());
/// guard.unlock().await?;
/// # Ok(())
/// # }
/// ```
#[must_use = "an unused guard is dropped at once, which releases the lock"]
#[clippy::has_significant_drop]
pub struct LockGuard {
    inner: GuardInner,
}

enum GuardInner {
    One(SingleHold),
    Several(Box<dyn Held>),
}

/// The holds behind the guard of several locks. Dropping it releases them all.
#[async_trait]
pub(crate) trait Held: Send + Sync {
    fn name(&self) -> &str;
    fn owner(&self) -> OwnerId;
    fn members(&self) -> &[LockGuard];
    async fn unlock(self: Box<Self>) -> Result<()>;
    async fn lost(&self) -> Error;
    fn remaining(&self) -> Result<Duration>;
    async fn extend(&self, lease: Duration) -> Result<()>;
    /// Leaves all members to their leases, and returns the owner of the first.
    fn leave_to_lease(self: Box<Self>) -> OwnerId;
}

/// One hold of one lock, released on drop.
struct SingleHold {
    anchor: Arc<Anchor>,
    hold: Arc<Hold>,
    /// `None` once the guard has released the hold or left it to its lease, or [`of_one_client`]
    /// has taken it.
    ticket: Option<Ticket>,
}

impl LockGuard {
    pub(crate) fn new(anchor: Arc<Anchor>, (hold, ticket): Entered) -> Self {
        Self {
            inner: GuardInner::One(SingleHold {
                anchor,
                hold,
                ticket: Some(ticket),
            }),
        }
    }

    pub(crate) fn of_several(held: impl Held + 'static) -> Self {
        Self {
            inner: GuardInner::Several(Box::new(held)),
        }
    }

    /// Returns the lock's name, with the client's prefix. For several locks: their names, joined
    /// with `+`.
    #[must_use]
    pub fn name(&self) -> &str {
        match &self.inner {
            GuardInner::One(single) => single.hold.lock_name(),
            GuardInner::Several(held) => held.name(),
        }
    }

    /// Returns the lock's owner; for a multi-lock or RedLock, the owner of its first member.
    #[must_use]
    pub fn owner(&self) -> OwnerId {
        match &self.inner {
            GuardInner::One(single) => single.owner(),
            GuardInner::Several(held) => held.owner(),
        }
    }

    /// Returns the guards of a multi-lock's members, in their order; of a RedLock, those that were
    /// acquired; otherwise none.
    #[must_use = "the members stay held by this guard"]
    pub fn members(&self) -> &[LockGuard] {
        match &self.inner {
            GuardInner::One(_) => &[],
            GuardInner::Several(held) => held.members(),
        }
    }

    /// Returns the fencing token, which is higher than that of every earlier holder. `None` if the
    /// kind has no tokens; see [`LockClient::fenced_lock`](crate::LockClient::fenced_lock).
    #[must_use]
    pub fn fencing_token(&self) -> Option<FencingToken> {
        match &self.inner {
            GuardInner::One(single) => {
                let token = single.ticket.as_ref()?.generation.token?;
                Some(FencingToken::recorded(token))
            }
            GuardInner::Several(_) => None,
        }
    }

    /// Returns how many replicas had acknowledged this hold when it was acquired, up to 255; `None`
    /// if none was required, or the hold was adopted. For several locks, the lowest number. See
    /// [`LockClientBuilder::replicas`](crate::LockClientBuilder::replicas).
    #[must_use]
    pub fn replicas(&self) -> Option<u32> {
        match &self.inner {
            GuardInner::One(single) => single.ticket.as_ref()?.replicas.map(u32::from),
            GuardInner::Several(held) => held.members().iter().map(Self::replicas).min().flatten(),
        }
    }

    /// Returns whether the owner holds the lock more than once.
    pub(crate) fn is_re_entry(&self) -> bool {
        match &self.inner {
            GuardInner::One(single) => single
                .ticket
                .as_ref()
                .is_some_and(|ticket| ticket.generation.ledger().count > 1),
            GuardInner::Several(_) => false,
        }
    }

    /// Returns how many entries of this record it holds. Returns `None` if it is not a hold of that client
    /// and record.
    pub(crate) fn entries(&self, anchor: &Arc<Anchor>, record: &str) -> Option<u16> {
        match &self.inner {
            GuardInner::One(single) => {
                let is_one =
                    Arc::ptr_eq(&single.anchor, anchor) && **single.hold.kind().record() == *record;
                is_one.then(|| single.hold.entries())
            }
            GuardInner::Several(_) => None,
        }
    }

    /// Releases this hold, and waits for the server's confirmation. A multi-lock releases all
    /// members and reports the first failure.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if the lock was lost before: others may have touched what it guards.
    /// [`Error::NotHeld`] if the hold was released without this guard. [`Error::Store`] or
    /// [`Error::Unconfirmed`] if the server rejected the release or did not reply within the
    /// command timeout: the client keeps releasing in the background, and the hold is no longer
    /// renewed or valid.
    ///
    /// # Cancel safety
    ///
    /// If dropped before it is polled, it releases like a dropped guard. Once polled, the release
    /// continues in the background if the future is dropped.
    pub async fn unlock(self) -> Result<()> {
        match self.inner {
            GuardInner::One(mut single) => match single.ticket.take() {
                Some(ticket) => single.anchor.release(&single.hold, ticket).await,
                None => Err(single.hold.not_held_error(&single.owner())),
            },
            GuardInner::Several(held) => held.unlock().await,
        }
    }

    /// Resolves when the lock is lost (no later than its lease ends on this client's monotonic
    /// clock), or when the hold was released without this guard. Never resolves while the lock is
    /// held. For `select!`. A multi-lock is lost as soon as one member is lost.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn lost(&self) -> Error {
        match &self.inner {
            GuardInner::One(single) => single.lost().await,
            GuardInner::Several(held) => held.lost().await,
        }
    }

    /// Returns whether the lock is lost, as far as this client knows by its own clock. Sends
    /// nothing.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.remaining_or_error().is_err()
    }

    /// Returns how much longer you may rely on the lock without a renewal: the lease, counted from
    /// before the request was sent, minus a drift allowance of 1 % and 2 ms. Zero if the lock is
    /// lost.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.remaining_or_error().unwrap_or(Duration::ZERO)
    }

    /// Returns until when you may rely on the lock without a renewal: now plus
    /// [`remaining`](Self::remaining). In the past, or now, if the lock is lost. redsync's `Until`.
    #[must_use]
    pub fn valid_until(&self) -> Instant {
        // Read first: a delay in between must make the result earlier, never later.
        let now = Instant::now();
        now + self.remaining()
    }

    /// Returns how the lock was lost, or `None` if it was not lost.
    pub(crate) fn loss(&self) -> Option<LossReason> {
        match self.remaining_or_error() {
            Err(Error::Lost { reason, .. }) => Some(reason),
            _ => None,
        }
    }

    pub(crate) fn remaining_or_error(&self) -> Result<Duration> {
        match &self.inner {
            GuardInner::One(single) => single.remaining(),
            GuardInner::Several(held) => held.remaining(),
        }
    }

    /// Extends the lease to at least `lease` from now, 10 ms to 10 years. Never shortens it.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if the lock was lost; [`Error::InvalidLease`]; [`Error::Store`] and
    /// [`Error::Unconfirmed`] if the server did not reply. The lock stays as it was; some members
    /// of a multi-lock may have been extended.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: if dropped midway, the lock may or may not have been extended.
    pub async fn extend(&self, lease: Duration) -> Result<()> {
        self.remaining_or_error()?;
        match &self.inner {
            GuardInner::One(single) => {
                let SingleHold { anchor, hold, .. } = single;
                let kind = hold.kind_as_acquired();
                match anchor.extend(&kind, &single.owner(), lease).await {
                    // the check below reports it, with the reason
                    Err(Error::NotHeld { .. }) => {}
                    extended => extended?,
                }
            }
            GuardInner::Several(held) => held.extend(lease).await?,
        }
        // an extension that found no hold on the server has ended this one
        self.remaining_or_error().map(drop)
    }

    /// Keeps the lock held until its lease ends, without renewing it: a job then runs once per
    /// interval, over all processes.
    ///
    /// A lock without a fixed lease lasts as long as its last renewal, at most the client's
    /// [`watchdog_timeout`](crate::LockClientBuilder::watchdog_timeout); set a
    /// [`lease`](crate::AcquireOptions::lease) to choose how long. A signal lock without expiry
    /// stays until it is released. [`shutdown`](crate::LockClient::shutdown) does not release it,
    /// and its owner does not re-enter it: its next acquire waits like that of any other owner.
    ///
    /// Until the lease ends, every process that knows the returned owner may
    /// [`release`](crate::Lock::release) or [`extend`](crate::Lock::extend) the lock. To let
    /// another task or process carry on under the lock, use [`hand_over`](Self::hand_over).
    ///
    /// Holds of other guards of the same owner stay held and renewed, and so does the lock; their
    /// releases do not end the hold that was left. Each hold that was left needs its own release,
    /// after those guards are gone: an earlier one is not counted, and the lock then stays held
    /// until its lease ends. Before you send the owner elsewhere, await
    /// [`idle`](crate::LockClient::idle), so that the server has counted the releases of dropped
    /// guards. If the connection broke during a nested acquire or release, the server may record
    /// one hold too many or too few until the lease ends. A writer that has left its nested read
    /// lock to the lease cannot read again until it has released the write lock.
    ///
    /// An owner that is a [`value`](crate::AcquireOptions::value) has no other name: its client may
    /// acquire the lock again a round trip before the lease ends, or after the first lease if another
    /// client has extended it.
    ///
    /// If the lock is lost, nothing is left to its lease. A multi-lock leaves all its members to
    /// their leases. The returned owner is that of the first member; the other members have the
    /// same owner only if all belong to one client.
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
        let owner = self.owner();
        match self.inner {
            GuardInner::One(mut single) => {
                if let Some(ticket) = single.ticket.take() {
                    single.anchor.leave_to_lease(&single.hold, &ticket);
                }
            }
            GuardInner::Several(held) => return held.leave_to_lease(),
        }
        owner
    }

    /// Hands the lock to another task or process, which must [`adopt`](crate::Lock::adopt) it
    /// within `keep` (10 ms to 10 years).
    ///
    /// From then on, this guard holds nothing, and the lock is not renewed: it stays held until it
    /// is adopted, or for `keep`. The only way to take it back is to adopt it. No other client gets
    /// the lock in between, and it can be adopted once. If `keep` ends sooner than the old lease,
    /// waiters notice when they next re-check the lock, within the
    /// [`poll_cap`](crate::LockClientBuilder::poll_cap); a Redisson waiter, which does not
    /// re-check, notices when the lease that the server last reported to it is over, or by the
    /// adopter's release.
    ///
    /// ```no_run
    /// # async fn example(lock: nestlock::Lock) -> nestlock::Result<()> {
    /// use std::time::Duration;
    ///
    /// let guard = lock.lock().await?;
    /// let job = guard.hand_over(Duration::from_secs(30)).await?.to_text();
    /// // send the text with the job; a worker carries on under the same lock
    /// # drop(job); Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// After [`Error::CannotHandOver`] (the owner holds the lock more than once, both reads and
    /// writes, or the lock combines several) and [`Error::InvalidLease`] the guard still holds the
    /// lock. [`Error::Lost`] and [`Error::NotHeld`] as with [`unlock`](Self::unlock). After
    /// [`Error::Store`] and [`Error::Unconfirmed`], [`remaining`](Self::remaining) shows which is
    /// the case: either the guard still holds the lock, or the lock was given up and is being
    /// released, even if the server has moved it.
    ///
    /// # Cancel safety
    ///
    /// If dropped midway, the same as after [`Error::Unconfirmed`]: the lock cannot be adopted, and
    /// is released.
    pub async fn hand_over(&self, keep: Duration) -> Result<HandOver> {
        match &self.inner {
            GuardInner::One(single) => {
                let SingleHold { anchor, hold, .. } = single;
                let ticket = single
                    .ticket
                    .as_ref()
                    .ok_or_else(|| hold.not_held_error(&single.owner()))?;
                let owner = anchor.transfer(hold, ticket, keep).await?;
                Ok(HandOver::new(
                    hold.kind().about().family,
                    hold.lock_name(),
                    owner,
                ))
            }
            GuardInner::Several(held) => Err(Error::CannotHandOver {
                lock: held.name().to_owned(),
                reason: "it combines several locks; hand over a single lock",
            }),
        }
    }

    /// Runs `future` while the lock is held, and drops it if the lock is lost.
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
            // If both are ready, the loss counts: `future` may have ended without the lock.
            biased;
            error = self.lost() => Err(error),
            output = future => Ok(output),
        }
    }
}

/// Takes the holds of these guards. Returns `None`, and takes nothing, unless each is a hold of one
/// lock and all belong to one client.
pub(crate) fn of_one_client(guards: &mut [LockGuard]) -> Option<(Arc<Anchor>, Vec<Entered>)> {
    let mut singles = Vec::with_capacity(guards.len());
    for guard in guards {
        match &mut guard.inner {
            GuardInner::One(single) => singles.push(single),
            GuardInner::Several(_) => return None,
        }
    }
    let anchor = Arc::clone(&singles.first()?.anchor);
    if !singles
        .iter()
        .all(|single| Arc::ptr_eq(&single.anchor, &anchor))
    {
        return None;
    }
    let held = singles
        .into_iter()
        .filter_map(|single| Some((Arc::clone(&single.hold), single.ticket.take()?)));
    Some((anchor, held.collect()))
}

impl SingleHold {
    fn owner(&self) -> OwnerId {
        self.ticket.as_ref().map_or_else(
            || self.hold.owner(),
            |ticket| ticket.generation.owner.clone(),
        )
    }

    fn remaining(&self) -> Result<Duration> {
        self.anchor.check_ours(self.hold.lock_name())?;
        match &self.ticket {
            Some(Ticket { generation, .. }) => generation
                .remaining()
                .map_err(|end| self.hold.end_error(generation, end)),
            None => Err(self.hold.not_held_error(&self.owner())),
        }
    }

    async fn lost(&self) -> Error {
        loop {
            let Some(ticket) = &self.ticket else {
                return self.hold.not_held_error(&self.owner());
            };
            let ended = ticket.generation.ended.notified();
            tokio::pin!(ended);
            // Registers before the check below, so that an end in between is not missed.
            ended.as_mut().enable();
            let remaining = match self.remaining() {
                Ok(remaining) => remaining,
                Err(error) => return error,
            };
            tokio::select! {
                () = ended => {}
                () = self.anchor.sleep_until(nestlock_wire::clock::Instant::now() + remaining) => {}
                // in a fork no timer fires: a poll there must check again, and return the error
                () = poll_fn(|_| if self.anchor.store.is_ours() { Poll::Pending } else { Poll::Ready(()) }) => {}
            }
        }
    }
}

impl Drop for SingleHold {
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
