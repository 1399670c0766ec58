//! What can be asked for: the client's configuration, and the options of one acquire.

use std::{num::NonZeroU32, time::Duration};

use crate::{
    clock::Instant,
    error::{Error, Result},
    meter::Meter,
    owner::OwnerId,
};

/// The shortest lease: anything less would be over before the answer is back.
const MIN_LEASE: Duration = Duration::from_millis(10);
/// The longest lease, ten years: far below what makes the server refuse.
const MAX_LEASE: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// The longest pause between two rounds: no more than the clock can count.
pub(crate) const LONGEST_DELAY: Duration = MAX_LEASE;
/// The shortest watchdog timeout: renewal at a third of it must survive a scheduler's hiccup.
const MIN_WATCHDOG: Duration = Duration::from_millis(200);

/// Which client carries requests and messages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Wire {
    /// nestlock's own: many requests in few system calls.
    #[default]
    Own,
    /// The client of the `fred` crate. Slower; for TLS that is not rustls, or to find out whose defect it is.
    Fred,
}

/// How waiters hear of releases in a cluster. All clients of the same locks must agree: who listens one way does not hear
/// what is said the other way, and looks every [`poll_cap`](crate::LockClientBuilder::poll_cap).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Messages {
    /// As Redisson: sharded where the servers have it (Redis 7.0, Valkey), else classic.
    #[default]
    Auto,
    /// `SSUBSCRIBE` and `SPUBLISH`: a message stays on the node of its lock. Some are lost while a slot moves; a waiter
    /// looks for itself then, within the poll cap.
    Sharded,
    /// `SUBSCRIBE` and `PUBLISH`: each message goes to all nodes.
    Classic,
}

/// Who must have what an acquire has written, besides the server, before it counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Copies {
    pub(crate) replicas: u32,
    /// How long that is waited for.
    pub(crate) timeout: Duration,
    /// On the disks of the server and of those replicas.
    pub(crate) fsync: bool,
}

impl Copies {
    /// Whether whoever has waited for these has waited for those.
    pub(crate) fn cover(self, other: Self) -> bool {
        self.replicas >= other.replicas && self.fsync == other.fsync
    }
}

/// Who logs in, and how.
#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct Login {
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
}

impl std::fmt::Debug for Login {
    /// Without either.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Login(..)")
    }
}

/// How long an acquire waits for a busy lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    No,
    For(Duration),
    Forever,
}

impl Wait {
    /// Zero tries once.
    pub(crate) fn at_most(wait: Duration) -> Self {
        if wait.is_zero() { Self::No } else { Self::For(wait) }
    }

    /// When the waiting ends; `None`: never.
    pub(crate) fn until(self, now: Instant) -> Option<Instant> {
        match self {
            Self::No => Some(now),
            Self::For(wait) => (wait <= MAX_LEASE).then(|| now + wait),
            Self::Forever => None,
        }
    }
}

/// How to hold: for how long, and as whom. How long to wait is the verb's to say: [`Lock::lock_with`](crate::Lock::lock_with),
/// [`Lock::try_lock_with`](crate::Lock::try_lock_with), [`Lock::try_lock_for_with`](crate::Lock::try_lock_for_with).
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
    /// In a box: a waiter keeps its options, and there may be many.
    pub(crate) rare: Option<Box<RareOptions>>,
}

/// What is seldom asked for.
#[derive(Debug, Clone, Default)]
pub(crate) struct RareOptions {
    pub(crate) owner: Option<OwnerId>,
    pub(crate) value: Option<String>,
    pub(crate) watchdog_timeout: Option<Duration>,
    /// Plus one.
    pub(crate) max_renewals: Option<NonZeroU32>,
    pub(crate) after_loss: bool,
    pub(crate) replicas: Option<u32>,
}

impl AcquireOptions {
    pub(crate) fn rare(&self) -> &RareOptions {
        static NONE: RareOptions = RareOptions {
            owner: None,
            value: None,
            watchdog_timeout: None,
            max_renewals: None,
            after_loss: false,
            replicas: None,
        };
        self.rare.as_deref().unwrap_or(&NONE)
    }

    fn rare_mut(&mut self) -> &mut RareOptions {
        self.rare.get_or_insert_default()
    }

    /// Acquires also while a guard of an earlier hold lives that was lost: a quorum, which takes a node again, keeps it.
    pub(crate) fn after_a_loss(mut self) -> Self {
        self.rare_mut().after_loss = true;
        self
    }

    /// Hold until released (the watchdog renews), as the calling task.
    pub fn new() -> Self {
        Self::default()
    }

    /// Holds the lock at most this long, and without the watchdog (Redisson's rule). From 10 ms to 10 years; parts of
    /// a millisecond are rounded up.
    ///
    /// A shorter lease never cuts a longer one that the owner has already.
    ///
    /// When it is over, the hold is lost, for its owner too. While a guard of it lives, the owner's acquires answer
    /// [`Error::Lost`]: a task that is still inside must not take what it lost for held. Once its guards are unlocked or
    /// dropped, the next acquire is a first hold like anybody's: what is left of the old record is released first, somebody
    /// else may have the lock by then, and a fenced lock gives a higher token.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = Some(lease);
        self
    }

    /// Acquires as this owner instead of the calling task; see [`LockClient::owner`](crate::LockClient::owner). An owner
    /// of another client is refused: its holds can be released and extended here, but nothing can be acquired as it.
    pub fn owner(mut self, owner: OwnerId) -> Self {
        self.rare_mut().owner = Some(owner);
        self
    }

    /// Acquires under this text, which is then in the record just as it is. For records of other systems only
    /// (string and signal locks): another process that knows the text can extend and release the lock.
    ///
    /// Use a text once, and let nobody guess it: two processes that acquire with one text **both hold the lock**, since a
    /// request that is sent again must not be refused. Where a request with it was never answered, further ones are refused
    /// ([`Error::Unconfirmed`]) until that is settled, those of an acquire that waits too: nothing tells the two apart, and
    /// a release that comes late ends whatever is held under its text. **Acquire under another text then**: settled means that
    /// the server has answered twice, a command timeout apart, and what comes later than that is not waited for.
    pub fn value(mut self, value: impl Into<String>) -> Self {
        self.rare_mut().value = Some(value.into());
        self
    }

    /// Holds the lock until it is released, as without a lease, but with this TTL instead of the client's
    /// [`watchdog_timeout`](crate::LockClientBuilder::watchdog_timeout): the watchdog renews it every third of it. From
    /// 10 ms to 10 years; a third of it must be enough for a renewal. A [`lease`](Self::lease) takes precedence.
    pub fn watchdog_timeout(mut self, timeout: Duration) -> Self {
        self.rare_mut().watchdog_timeout = Some(timeout);
        self
    }

    /// The watchdog renews the lock this often at most; then it ends with its TTL, and is reported as lost. The RedLock
    /// text asks for such a limit, so that a holder that hangs does not hold for ever. Default: no limit.
    /// <https://redis.io/docs/latest/develop/use/patterns/distributed-locks/>
    pub fn max_renewals(mut self, renewals: u32) -> Self {
        self.rare_mut().max_renewals = NonZeroU32::MIN.checked_add(renewals);
        self
    }

    /// This acquire counts when so many replicas have it, whatever the client's
    /// [`replicas`](crate::LockClientBuilder::replicas) says; 0: none needs to. They are waited for as long as is said there,
    /// 500 ms if nothing is. Renewals of an owner that holds the lock several times count when as many have them as the most
    /// demanding of these acquires has asked for, until all are released; and so does the lease of an inner one, which is had
    /// all the same if as many have it as it asks for itself.
    pub fn replicas(mut self, replicas: u32) -> Self {
        self.rare_mut().replicas = Some(replicas);
        self
    }
}

/// How long a spin lock's waiter pauses between two tries.
///
/// Every pause is shortened by a random part, up to a half, so that waiters do not try in step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Backoff {
    initial: Duration,
    max: Duration,
    multiplier: f64,
}

impl Backoff {
    /// Pauses that grow from `initial` by `multiplier` up to `max`. Redisson's default is 1 ms, 128 ms and 2.
    ///
    /// A pause is at least 1 ms, and at most an hour; a multiplier below 1, or one that is not a number, counts as 1.
    #[must_use]
    pub fn exponential(initial: Duration, max: Duration, multiplier: f64) -> Self {
        let initial = initial.clamp(Duration::from_millis(1), Duration::from_secs(3600));
        Self {
            initial,
            max: max.clamp(initial, Duration::from_secs(3600)),
            multiplier: if multiplier >= 1.0 { multiplier } else { 1.0 },
        }
    }

    /// Pauses of one length, 1 ms to an hour. Redisson's default is 64 ms.
    #[must_use]
    pub fn constant(pause: Duration) -> Self {
        Self::exponential(pause, pause, 1.0)
    }

    /// The pause after this many tries, before its random part.
    pub(crate) fn pause(&self, tries: u32) -> Duration {
        let exponent = i32::try_from(tries.saturating_sub(1)).unwrap_or(i32::MAX);
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

/// How a signal lock keeps its record and its signal; see
/// [`LockClient::signal_lock_with`](crate::LockClient::signal_lock_with).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct SignalOptions {
    pub(crate) expires: bool,
    pub(crate) signal_expire: Duration,
}

impl SignalOptions {
    /// As python-redis-lock with `expire` and `auto_renewal`: records expire and are renewed, signals live for 1 s.
    pub fn new() -> Self {
        Self::default()
    }

    /// A hold without a lease of its own has no TTL and is not renewed: it lasts until it is released. As
    /// python-redis-lock without `expire`.
    ///
    /// **Nothing frees it when this process dies** but a release by its owner's name, or a reset. While it is held, a
    /// loss is not looked for: [`LockGuard::unlock`](crate::LockGuard::unlock) is the first to notice, and
    /// [`LockGuard::remaining`](crate::LockGuard::remaining) counts down from ten years.
    pub fn without_expiry(mut self) -> Self {
        self.expires = false;
        self
    }

    /// How long the signal of a release waits for a waiter. Default 1 s, as theirs; 1 ms to 10 years. Where none comes,
    /// it is gone by itself.
    pub fn signal_expire(mut self, life: Duration) -> Self {
        self.signal_expire = life.clamp(Duration::from_millis(1), MAX_LEASE);
        self
    }
}

impl Default for SignalOptions {
    fn default() -> Self {
        Self { expires: true, signal_expire: Duration::from_secs(1) }
    }
}

/// Checks a lease, and rounds it up to whole milliseconds.
pub(crate) fn checked_lease(lock: &str, lease: Duration) -> Result<Duration> {
    let refuse = |reason| Err(Error::InvalidLease { lock: lock.to_owned(), lease, reason });
    if lease < MIN_LEASE {
        return refuse("it must be at least 10 ms");
    }
    if lease > MAX_LEASE {
        return refuse("it must be at most 10 years; leave it out to hold the lock until it is released");
    }
    Ok(Duration::from_millis(millis(lease)))
}

/// Whole milliseconds, rounded up.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// How long a hold may be relied on after the request was sent: the lease less a drift allowance of 1 % + 2 ms, as
/// the RedLock text asks. <https://redis.io/docs/latest/develop/use/patterns/distributed-locks/>
pub(crate) fn validity(lease: Duration) -> Duration {
    lease.saturating_sub(lease / 100 + Duration::from_millis(2))
}

/// The client's configuration; the builder's methods say what each field means.
#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "each is a choice of its own")]
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
    pub(crate) relay: bool,
    pub(crate) bundle: bool,
    /// Whether a client that connects tries whether the server runs scripts.
    pub(crate) tries_scripts: bool,
    pub(crate) grants: bool,
    pub(crate) wire: Wire,
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
            relay: true,
            bundle: true,
            tries_scripts: true,
            grants: true,
            wire: Wire::default(),
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
            return refuse(format!("watchdog_timeout is {:?}; use 200 ms to 10 years", self.watchdog_timeout));
        }
        self.watchdog_timeout = Duration::from_millis(millis(self.watchdog_timeout));
        let third = self.watchdog_timeout / 3;
        match self.command_timeout {
            Some(timeout) if timeout < Duration::from_millis(1) || timeout > third => {
                return refuse(format!(
                    "command_timeout is {timeout:?}; use 1 ms to a third of the watchdog timeout ({third:?}), \
                     so that a renewal can fail and be repeated in time"
                ));
            }
            _ => {}
        }
        let third = self.command_timeout() / 3;
        if let Some(timeout) = self.replicas_timeout
            && (timeout < Duration::from_millis(1) || timeout > third)
        {
            return refuse(format!(
                "replicas are waited for {timeout:?}; use 1 ms to a third of the command timeout ({third:?}): \
                 whatever is asked meanwhile stands behind it"
            ));
        }
        if self.poll_cap < Duration::from_millis(1) {
            return refuse(format!("poll_cap is {:?}; use at least 1 ms", self.poll_cap));
        }
        if self.fair_patience < MIN_WATCHDOG || self.fair_patience > MAX_LEASE {
            return refuse(format!("fair_patience is {:?}; use 200 ms to 10 years", self.fair_patience));
        }
        if self.connect_timeout < Duration::from_millis(1) {
            return refuse(format!("connect_timeout is {:?}; use at least 1 ms", self.connect_timeout));
        }
        // "for ever" must not overflow the clock
        for endless in [&mut self.poll_cap, &mut self.connect_timeout, &mut self.outage_patience] {
            *endless = (*endless).min(MAX_LEASE);
        }
        if self.max_name_len == 0 || self.max_holds == 0 {
            return refuse("max_name_len and max_holds must be at least 1".into());
        }
        Ok(self)
    }

    /// Who must have what an acquire has written, if so many replicas are asked for; `None`: nobody.
    pub(crate) fn copies(&self, replicas: u32) -> Option<Copies> {
        let longest = self.command_timeout() / 3;
        let timeout = self.replicas_timeout.unwrap_or(Duration::from_millis(500)).min(longest);
        (replicas > 0 || self.fsync).then_some(Copies { replicas, timeout, fsync: self.fsync })
    }

    /// How long one request may take; by default 3 s, or a third of the watchdog timeout if that is less.
    pub(crate) fn command_timeout(&self) -> Duration {
        self.command_timeout.unwrap_or(Duration::from_secs(3).min(self.watchdog_timeout / 3))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// H1, H2, L2, P1: no lease that the server would refuse or turn into a deletion passes.
    #[test]
    fn h1_h2_leases_are_rounded_up_or_refused() {
        for bad in [0, 1, 999_999, 9_999_999] {
            assert!(checked_lease("l", Duration::from_nanos(bad)).is_err(), "{bad} ns");
        }
        assert_eq!(checked_lease("l", Duration::from_micros(10_001)).unwrap(), Duration::from_millis(11));
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
        let pauses: Vec<_> = (1..=10).map(|tries| Backoff::default().pause(tries).as_millis()).collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 128, 128, 128]);
        assert_eq!(Backoff::default().pause(u32::MAX), Duration::from_millis(128));
        assert_eq!(Backoff::constant(Duration::from_millis(64)).pause(9), Duration::from_millis(64));
        let odd = Backoff::exponential(Duration::ZERO, Duration::MAX, f64::NAN);
        assert_eq!(odd.pause(1), Duration::from_millis(1));
    }

    /// R26, R36, L5: extremes of the configuration are refused or work.
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
