//! Options: the configuration of a client, and the options of one acquire.

use std::{sync::Arc, time::Duration};

use nestlock_wire::{
    Copies, Login, Wire,
    clock::{Instant, millis},
};

use crate::{
    error::{Error, Result},
    meter::Meter,
    owner::OwnerId,
};

/// The shortest lease: anything shorter would be over before the reply arrives.
const MIN_LEASE: Duration = Duration::from_millis(10);
/// The longest lease, ten years: far below what the server rejects.
const MAX_LEASE: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// The longest pause between two rounds, which the clock can still represent.
pub(crate) const LONGEST_DELAY: Duration = MAX_LEASE;
/// The shortest watchdog timeout: renewal at a third of it must survive a short scheduling delay.
const MIN_WATCHDOG: Duration = Duration::from_millis(200);

/// The longest note, in bytes.
const LONGEST_NOTE: usize = 256;

/// How waiters learn of releases in a cluster. All clients of a lock must agree: a client that
/// subscribes one way does not receive messages sent the other way, and only re-checks the lock
/// every [`poll_cap`](crate::LockClientBuilder::poll_cap).
///
/// ```no_run
/// # async fn example() -> nestlock::Result<()> {
/// use nestlock::{LockClient, Messages};
///
/// let client = LockClient::builder()
///     .messages(Messages::Classic)
///     .connect("redis-cluster://127.0.0.1:7000,127.0.0.1:7001")
///     .await?;
/// # drop(client); Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Messages {
    /// Like Redisson: sharded if the servers support it (Redis 7.0, Valkey), otherwise classic.
    #[default]
    Auto,
    /// `SSUBSCRIBE` and `SPUBLISH`: a message stays on the node of its lock. Some are lost while a
    /// slot moves; a waiter then re-checks the lock within the poll cap.
    Sharded,
    /// `SUBSCRIBE` and `PUBLISH`: each message goes to all nodes.
    Classic,
}

/// How long an acquire waits for a busy lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    No,
    For(Duration),
    Forever,
}

impl Wait {
    /// Returns a wait of at most this long. Zero tries once.
    pub(crate) fn at_most(wait: Duration) -> Self {
        if wait.is_zero() {
            Self::No
        } else {
            Self::For(wait)
        }
    }

    /// Returns when the wait ends. Returns `None` if it is without limit, or longer than 10 years.
    pub(crate) fn until(self, now: Instant) -> Option<Instant> {
        match self {
            Self::No => Some(now),
            Self::For(wait) => (wait <= MAX_LEASE).then(|| now + wait),
            Self::Forever => None,
        }
    }
}

/// Options of one acquire: its lease and its owner. How long to wait is up to the method:
/// [`Lock::lock_with`](crate::Lock::lock_with),
/// [`Lock::try_lock_with`](crate::Lock::try_lock_with),
/// [`Lock::try_lock_for_with`](crate::Lock::try_lock_for_with).
///
/// ```no_run
/// # async fn example(lock: nestlock::Lock) -> nestlock::Result<()> {
/// use std::time::Duration;
/// use nestlock::AcquireOptions;
///
/// let guard = lock.lock_with(AcquireOptions::new().lease(Duration::from_secs(30))).await?;
/// guard.unlock().await
/// # }
/// ```
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct AcquireOptions {
    pub(crate) lease: Option<Duration>,
    /// Boxed, since each waiter keeps its options, and there may be many waiters.
    pub(crate) rare: Option<Box<RareOptions>>,
}

/// Rarely used options.
#[derive(Debug, Clone, Default)]
pub(crate) struct RareOptions {
    pub(crate) owner: Option<OwnerId>,
    pub(crate) value: Option<String>,
    pub(crate) watchdog_timeout: Option<Duration>,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) after_loss: bool,
    pub(crate) replicas: Option<u32>,
    pub(crate) note: Option<Arc<str>>,
}

impl AcquireOptions {
    pub(crate) fn rare(&self) -> &RareOptions {
        static NONE: RareOptions = RareOptions {
            owner: None,
            value: None,
            watchdog_timeout: None,
            max_hold: None,
            after_loss: false,
            replicas: None,
            note: None,
        };
        self.rare.as_deref().unwrap_or(&NONE)
    }

    fn rare_mut(&mut self) -> &mut RareOptions {
        self.rare.get_or_insert_default()
    }

    /// Returns the TTL of a hold with these options, where `default` is that of a hold without a
    /// lease or a watchdog timeout.
    pub(crate) fn ttl(&self, default: Duration) -> Duration {
        let rare = self.rare();
        let ttl = self.lease.or(rare.watchdog_timeout).unwrap_or(default);
        rare.max_hold.map_or(ttl, |longest| ttl.min(longest))
    }

    /// Acquires even while a guard of an earlier, lost hold is alive: a quorum that re-acquires on
    /// a node keeps such a guard.
    pub(crate) fn after_a_loss(mut self) -> Self {
        self.rare_mut().after_loss = true;
        self
    }

    /// Returns the default options: the caller holds the lock until it is released, and the
    /// watchdog renews the lease.
    pub fn new() -> Self {
        Self::default()
    }

    /// Holds the lock at most this long, without the watchdog (as in Redisson). 10 ms to 10 years;
    /// fractions of a millisecond are rounded up.
    ///
    /// A shorter lease never shortens a longer one that the owner already has.
    ///
    /// When the lease is over, the hold is lost, for its owner too. While one of its guards is
    /// alive, the owner's acquires fail with [`Error::Lost`]: a task that is still inside must not
    /// mistake the lost lock for a held one. Once its guards are unlocked or dropped, the next
    /// acquire is a first hold like any other: the client first releases what remains of the old
    /// record, another owner may have the lock by then, and a fenced lock issues a higher token.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = Some(lease);
        self
    }

    /// Acquires as this owner instead of the calling task; see
    /// [`LockClient::owner`](crate::LockClient::owner). An owner of another client is rejected:
    /// this client can release and extend its holds, but not acquire as it. The owner of one acquire
    /// (of a [`mutex`](crate::LockClient::mutex), or after
    /// [`owner_per_acquire`](crate::Lock::owner_per_acquire)) acquires only while its guard holds the
    /// lock, to nest a hold; afterwards it is rejected with [`Error::InvalidOwner`]. The same owner as
    /// a text, or read from the record, is rejected after the mutex has passed to another task.
    pub fn owner(mut self, owner: OwnerId) -> Self {
        self.rare_mut().owner = Some(owner);
        self
    }

    /// Uses this text as the owner, exactly as it is in the record. Only for records of other
    /// systems (string and signal locks): another process that knows the text can extend and
    /// release the lock.
    ///
    /// Use each text only once, and make it unguessable: two processes that acquire with the same
    /// text **both hold the lock**, because a retried request must succeed. If a request with this
    /// text got no reply, further requests fail with [`Error::Unconfirmed`], even in an acquire
    /// that waits, until the client has settled the first: nothing distinguishes the two, and a
    /// late release ends any hold under its text. **Use another text in that case**: "settled"
    /// means only that the server has replied twice, one command timeout apart; the client does not
    /// wait for a request that arrives even later.
    pub fn value(mut self, value: impl Into<String>) -> Self {
        self.rare_mut().value = Some(value.into());
        self
    }

    /// Holds the lock until it is released, with this TTL instead of the client's
    /// [`watchdog_timeout`](crate::LockClientBuilder::watchdog_timeout): the watchdog renews it
    /// every third of this. 10 ms to 10 years; a third of it must be enough for a renewal. A
    /// [`lease`](Self::lease) takes precedence.
    pub fn watchdog_timeout(mut self, timeout: Duration) -> Self {
        self.rare_mut().watchdog_timeout = Some(timeout);
        self
    }

    /// Limits how long the lock is held, counted from the acquire: the watchdog renews the lock up to
    /// that instant and no further, then the lock is free, and its guard reports it as lost
    /// ([`LossReason::LeaseExpired`](crate::LossReason::LeaseExpired)), up to 1 % of the TTL and 2 ms
    /// earlier. 10 ms to 10 years; it also shortens a longer [`lease`](Self::lease). Default: no limit.
    ///
    /// Use it so that a task that hangs does not keep the lock until its process ends, as the
    /// [description of
    /// RedLock](https://redis.io/docs/latest/develop/use/patterns/distributed-locks/) calls for.
    ///
    /// Each nested hold has its own limit: the lock is renewed while one of them has not reached
    /// its limit, and lasts for as long as the longest lease that one of them was granted.
    /// [`LockGuard::extend`](crate::LockGuard::extend) may go beyond the limit. The server counts the
    /// TTL of a renewal from when it executes it: the record lives longer than the limit by the time
    /// that its last renewal waited for a connection or was in flight, at most the command timeout.
    /// The record of a signal lock lives for whole seconds, so up to 1 s longer than its guard.
    ///
    /// ```no_run
    /// # async fn example(lock: nestlock::Lock) -> nestlock::Result<()> {
    /// use std::time::Duration;
    ///
    /// use nestlock::AcquireOptions;
    ///
    /// let options = AcquireOptions::new().max_hold(Duration::from_secs(300));
    /// let guard = lock.lock_with(options).await?;
    /// tokio::select! {
    ///     () = work() => guard.unlock().await,
    ///     lost = guard.lost() => Err(lost), // after 5 minutes
    /// }
    /// # }
    /// # async fn work() {}
    /// ```
    pub fn max_hold(mut self, longest: Duration) -> Self {
        self.rare_mut().max_hold = Some(longest);
        self
    }

    /// Requires acknowledgement of this acquire by this many replicas, instead of the client's
    /// [`replicas`](crate::LockClientBuilder::replicas); 0: none. The timeout is the client's, 500
    /// ms if it has none.
    ///
    /// If an owner holds the lock several times, a renewal needs as many acknowledgements as the
    /// most demanding of these acquires, until all holds are released. So does the longer lease of
    /// a nested acquire; but the acquire itself needs only those that it requires.
    pub fn replicas(mut self, replicas: u32) -> Self {
        self.rare_mut().replicas = Some(replicas);
        self
    }

    /// Says why the lock is held: one line of 1 to 256 bytes, for [`Lock::notes`](crate::Lock::notes)
    /// and the command line, which also show since when, and the holder's application, host and
    /// process.
    ///
    /// ```no_run
    /// # async fn example(lock: nestlock::Lock) -> nestlock::Result<()> {
    /// use nestlock::AcquireOptions;
    ///
    /// let guard = lock.lock_with(AcquireOptions::new().note("nightly import")).await?;
    /// # guard.unlock().await
    /// # }
    /// ```
    ///
    /// A note is a hint. The client writes it after the acquire, to a key of its own beside the
    /// record, writes it again whenever the lease has grown, and erases it after the hold: two more
    /// requests, for which neither the acquire nor the release waits. If they fail, the note is
    /// missing, or stays until its TTL is over. Others may read it: no secrets. Its key contains the owner,
    /// and so the text of a [`value`](Self::value).
    ///
    /// Of nested holds, the first note counts until the owner has released all of them. An owner that
    /// writes and reads has the last one. With very many notes on a slow link some are missing: few
    /// are in flight at once, so that locks do not wait for them. A text that is empty, longer, or has
    /// control characters is refused with [`Error::InvalidNote`] by the acquire.
    pub fn note(mut self, note: impl Into<String>) -> Self {
        self.rare_mut().note = Some(note.into().into());
        self
    }
}

/// The back-off of a waiter that retries, such as that of a spin lock.
///
/// Each pause is shortened by a random part, up to a half, so that waiters do not retry in step.
///
/// ```
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = nestlock_embedded::EmbeddedServer::start()?;
/// # let client = nestlock::LockClient::connect(server.url()).await?;
/// use std::time::Duration;
///
/// use nestlock::Backoff;
///
/// let (first, longest) = (Duration::from_millis(2), Duration::from_millis(50));
/// let counter = client.spin_lock_with("counter", Backoff::exponential(first, longest, 2.0))?;
/// let guard = counter.lock().await?;
/// guard.unlock().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Backoff {
    initial: Duration,
    max: Duration,
    multiplier: f64,
}

impl Backoff {
    /// Returns pauses that grow from `initial` by `multiplier` up to `max`. Redisson's default is 1
    /// ms, 128 ms and 2.
    ///
    /// A pause is 1 ms to an hour; a multiplier below 1, or one that is not a number, counts as 1.
    #[must_use]
    pub fn exponential(initial: Duration, max: Duration, multiplier: f64) -> Self {
        let initial = initial.clamp(Duration::from_millis(1), Duration::from_secs(3600));
        Self {
            initial,
            max: max.clamp(initial, Duration::from_secs(3600)),
            multiplier: if multiplier >= 1.0 { multiplier } else { 1.0 },
        }
    }

    /// Returns pauses of a fixed length, 1 ms to an hour. Redisson's default is 64 ms.
    #[must_use]
    pub fn constant(pause: Duration) -> Self {
        Self::exponential(pause, pause, 1.0)
    }

    /// Returns the pause after this many tries, without its random part.
    pub(crate) fn pause(&self, tries: u32) -> Duration {
        let exponent = i32::try_from(tries.saturating_sub(1)).unwrap_or(i32::MAX);
        // Without the cap, the power could overflow, and `mul_f64` panics on that.
        let factor = self.multiplier.powi(exponent).min(1e9);
        self.initial.mul_f64(factor).min(self.max)
    }
}

impl Default for Backoff {
    /// From 1 ms to 128 ms, doubling.
    fn default() -> Self {
        Self::exponential(Duration::from_millis(1), Duration::from_millis(128), 2.0)
    }
}

/// How long a signal lock keeps its record and its signal; see
/// [`LockClient::signal_lock_with`](crate::LockClient::signal_lock_with).
///
/// ```
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = nestlock_embedded::EmbeddedServer::start()?;
/// # let client = nestlock::LockClient::connect(server.url()).await?;
/// use std::time::Duration;
///
/// use nestlock::SignalOptions;
///
/// let options = SignalOptions::new().signal_expire(Duration::from_secs(5));
/// let guard = client.signal_lock_with("nightly", options)?.lock().await?;
/// guard.unlock().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct SignalOptions {
    pub(crate) expires: bool,
    pub(crate) signal_expire: Duration,
}

impl SignalOptions {
    /// Returns options like those of python-redis-lock with `expire` and `auto_renewal`: records
    /// expire and are renewed, signals live for 1 s.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates records without a TTL for holds without a lease: such holds are not renewed and last
    /// until they are released. Like python-redis-lock without `expire`.
    ///
    /// **If this process dies, nothing frees such a lock** except a release with its owner, or a
    /// reset. While it is held, the client does not check for a loss:
    /// [`LockGuard::unlock`](crate::LockGuard::unlock) is the first to notice, and
    /// [`LockGuard::remaining`](crate::LockGuard::remaining) counts down from ten years.
    pub fn without_expiry(mut self) -> Self {
        self.expires = false;
        self
    }

    /// Sets how long the signal of a release waits for a waiter before it expires. Default 1 s, as
    /// in python-redis-lock; 1 ms to 10 years.
    pub fn signal_expire(mut self, life: Duration) -> Self {
        self.signal_expire = life.clamp(Duration::from_millis(1), MAX_LEASE);
        self
    }
}

impl Default for SignalOptions {
    fn default() -> Self {
        Self {
            expires: true,
            signal_expire: Duration::from_secs(1),
        }
    }
}

/// Checks a lease, and rounds it up to whole milliseconds.
pub(crate) fn checked_lease(lock: &str, lease: Duration) -> Result<Duration> {
    let refuse = |reason| {
        Err(Error::InvalidLease {
            lock: lock.to_owned(),
            lease,
            reason,
        })
    };
    if lease < MIN_LEASE {
        return refuse("it must be at least 10 ms");
    }
    if lease > MAX_LEASE {
        return refuse(
            "it must be at most 10 years; leave it out to hold the lock until it is released",
        );
    }
    Ok(Duration::from_millis(millis(lease)))
}

/// Returns whether a character ends a line, or changes the direction of the text behind it.
fn is_turning(letter: char) -> bool {
    matches!(letter, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Checks a note.
pub(crate) fn checked_note(lock: &str, note: &str) -> Result<()> {
    let reason = if note.is_empty() {
        "it is empty; say why the lock is held, or leave it out"
    } else if note.len() > LONGEST_NOTE {
        "it has more than 256 bytes; use a shorter one"
    } else if note.contains(|letter| char::is_control(letter) || is_turning(letter)) {
        "it has a line break or another control character; use one line of text"
    } else {
        return Ok(());
    };
    Err(Error::InvalidNote {
        lock: lock.to_owned(),
        reason,
    })
}

/// Returns how long a hold is valid after the request was sent: the lease minus a drift allowance
/// of 1 % + 2 ms, as in the description of RedLock.
/// <https://redis.io/docs/latest/develop/use/patterns/distributed-locks/>
pub(crate) fn validity(lease: Duration) -> Duration {
    lease.saturating_sub(lease / 100 + Duration::from_millis(2))
}

/// Choices for tests and benchmarks, which turn an optimisation off. Unstable.
#[doc(hidden)]
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "each is a choice of its own")]
pub struct Tuning {
    /// A lock passes from one task of a client to the next waiting one without a request.
    pub relay: bool,
    /// The release of a fair lock makes the next waiter the holder.
    pub grants: bool,
    /// Acquires and releases of plain locks that are ready at the same moment are sent as one
    /// script.
    pub bundle: bool,
    /// The client checks at connect that the server runs scripts.
    pub tries_scripts: bool,
    /// The client that carries requests and messages.
    pub wire: Wire,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            relay: true,
            grants: true,
            bundle: true,
            tries_scripts: true,
            wire: Wire::default(),
        }
    }
}

/// The client's configuration; see the builder's methods.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    pub(crate) watchdog_timeout: Duration,
    pub(crate) poll_cap: Duration,
    pub(crate) command_timeout: Option<Duration>,
    pub(crate) connect_timeout: Duration,
    pub(crate) outage_patience: Duration,
    pub(crate) fair_patience: Duration,
    pub(crate) name_prefix: String,
    pub(crate) max_name_len: usize,
    pub(crate) max_holds: u32,
    pub(crate) tuning: Tuning,
    pub(crate) messages: Messages,
    pub(crate) sentinel_login: Option<Login>,
    pub(crate) replicas: u32,
    pub(crate) replicas_timeout: Option<Duration>,
    pub(crate) fsync: bool,
    pub(crate) application: Option<String>,
    pub(crate) meter: Meter,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            watchdog_timeout: Duration::from_secs(30),
            poll_cap: Duration::from_secs(1),
            command_timeout: None,
            connect_timeout: Duration::from_secs(5),
            outage_patience: Duration::from_secs(10),
            fair_patience: Duration::from_secs(15),
            name_prefix: String::new(),
            max_name_len: 1024,
            max_holds: u32::MAX,
            tuning: Tuning::default(),
            messages: Messages::default(),
            sentinel_login: None,
            replicas: 0,
            replicas_timeout: None,
            fsync: false,
            application: None,
            meter: Meter::default(),
        }
    }
}

impl Config {
    pub(crate) fn validate(mut self) -> Result<Self> {
        let refuse = |reason: String| Err(Error::InvalidConfig { reason });
        if self.watchdog_timeout < MIN_WATCHDOG || self.watchdog_timeout > MAX_LEASE {
            return refuse(format!(
                "watchdog_timeout is {:?}; use 200 ms to 10 years",
                self.watchdog_timeout
            ));
        }
        self.watchdog_timeout = Duration::from_millis(millis(self.watchdog_timeout));
        let third = self.watchdog_timeout / 3;
        match self.command_timeout {
            Some(timeout) if timeout < Duration::from_millis(1) || timeout > third => {
                return refuse(format!(
                    "command_timeout is {timeout:?}; use 1 ms to a third of the watchdog timeout ({third:?}), \
                     so that a renewal can fail and be retried in time"
                ));
            }
            _ => {}
        }
        let third = self.command_timeout() / 3;
        if let Some(timeout) = self.replicas_timeout
            && (timeout < Duration::from_millis(1) || timeout > third)
        {
            return refuse(format!(
                "the replicas timeout is {timeout:?}; use 1 ms to a third of the command timeout ({third:?}): \
                 later requests wait behind it"
            ));
        }
        if self.poll_cap < Duration::from_millis(1) {
            return refuse(format!(
                "poll_cap is {:?}; use at least 1 ms",
                self.poll_cap
            ));
        }
        if self.fair_patience < MIN_WATCHDOG || self.fair_patience > MAX_LEASE {
            return refuse(format!(
                "fair_patience is {:?}; use 200 ms to 10 years",
                self.fair_patience
            ));
        }
        if self.connect_timeout < Duration::from_millis(1) {
            return refuse(format!(
                "connect_timeout is {:?}; use at least 1 ms",
                self.connect_timeout
            ));
        }
        // a very long time must not overflow the clock
        for endless in [
            &mut self.poll_cap,
            &mut self.connect_timeout,
            &mut self.outage_patience,
        ] {
            *endless = (*endless).min(MAX_LEASE);
        }
        if self.max_name_len == 0 || self.max_holds == 0 {
            return refuse("max_name_len and max_holds must be at least 1".into());
        }
        Ok(self)
    }

    /// Returns the copies that an acquire with this many replicas needs. Returns `None` if it needs
    /// none.
    pub(crate) fn copies(&self, replicas: u32) -> Option<Copies> {
        let longest = self.command_timeout() / 3;
        let timeout = self
            .replicas_timeout
            .unwrap_or(Duration::from_millis(500))
            .min(longest);
        (replicas > 0 || self.fsync).then_some(Copies {
            replicas,
            timeout,
            fsync: self.fsync,
        })
    }

    /// Returns how long one request may take; by default 3 s, or a third of the watchdog timeout if
    /// that is less.
    pub(crate) fn command_timeout(&self) -> Duration {
        self.command_timeout
            .unwrap_or(Duration::from_secs(3).min(self.watchdog_timeout / 3))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// H1, H2, L2, P1: a lease that the server would reject or turn into a deletion does not pass.
    #[test]
    fn h1_h2_leases_are_rounded_up_or_refused() {
        for bad in [0, 1, 999_999, 9_999_999] {
            assert!(
                checked_lease("l", Duration::from_nanos(bad)).is_err(),
                "{bad} ns"
            );
        }
        assert_eq!(
            checked_lease("l", Duration::from_micros(10_001)).unwrap(),
            Duration::from_millis(11)
        );
        assert!(checked_lease("l", MAX_LEASE).is_ok());
        assert!(checked_lease("l", MAX_LEASE + Duration::from_nanos(1)).is_err());
        assert!(checked_lease("l", Duration::MAX).is_err());
    }

    #[test]
    fn a_wait_beyond_the_clock_is_without_limit() {
        let now = Instant::now();
        assert_eq!(Wait::For(Duration::MAX).until(now), None);
        assert_eq!(Wait::at_most(Duration::ZERO), Wait::No);
    }

    #[test]
    fn pauses_grow_to_their_limit() {
        let pauses: Vec<_> = (1..=10)
            .map(|tries| Backoff::default().pause(tries).as_millis())
            .collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 128, 128, 128]);
        assert_eq!(
            Backoff::default().pause(u32::MAX),
            Duration::from_millis(128)
        );
        assert_eq!(
            Backoff::constant(Duration::from_millis(64)).pause(9),
            Duration::from_millis(64)
        );
        let odd = Backoff::exponential(Duration::ZERO, Duration::MAX, f64::NAN);
        assert_eq!(odd.pause(1), Duration::from_millis(1));
    }

    /// R26, R36, L5: extremes of the configuration are rejected or work.
    #[test]
    fn r26_r36_configuration_extremes_are_refused() {
        let config = |change: fn(&mut Config)| {
            let mut config = Config::default();
            change(&mut config);
            config.validate()
        };
        assert!(config(|_| {}).is_ok());
        assert!(config(|c| c.watchdog_timeout = Duration::from_millis(199)).is_err());
        assert!(config(|c| c.watchdog_timeout = Duration::MAX).is_err());
        assert!(config(|c| c.command_timeout = Some(Duration::ZERO)).is_err());
        assert!(config(|c| c.command_timeout = Some(Duration::from_secs(11))).is_err());
        assert!(config(|c| c.poll_cap = Duration::ZERO).is_err());
        assert!(config(|c| c.max_holds = 0).is_err());
    }
}
