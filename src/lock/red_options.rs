//! The options of a RedLock.

use std::{fmt, sync::Arc, time::Duration};

use crate::{
    engine::random_fraction,
    error::{Error, Result},
    options::{LONGEST_DELAY, checked_lease},
};
/// The options of a RedLock; see [`LockClient::red_lock`](crate::LockClient::red_lock). The
/// defaults are redsync's.
///
/// ```
/// # fn example(clients: &[nestlock::LockClient]) -> nestlock::Result<()> {
/// use std::time::Duration;
///
/// use nestlock::{LockClient, RedLockOptions};
///
/// // as in RedLock-Hyperf
/// let options = RedLockOptions::new()
///     .tries(2)
///     .retry_delay(Duration::from_millis(100), Duration::from_millis(200));
/// let lock = LockClient::red_lock(clients, "invoice:7", options)?;
/// # drop(lock); Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use]
pub struct RedLockOptions {
    pub(super) expiry: Duration,
    pub(super) tries: u32,
    retry_delay: RetryDelay,
    pub(super) drift_factor: f64,
    pub(super) timeout_factor: f64,
    pub(super) value: OwnerValue,
    pub(super) fail_fast: bool,
    pub(super) shuffle: bool,
    pub(super) recreate_on_extend: bool,
    pub(super) max_hold: Option<Duration>,
}

#[derive(Clone)]
enum RetryDelay {
    Uniform(Duration, Duration),
    OfTry(Arc<dyn Fn(u32) -> Duration + Send + Sync>),
}

#[derive(Clone)]
pub(super) enum OwnerValue {
    Random,
    Fixed(String),
    Made(Arc<dyn Fn() -> String + Send + Sync>),
}

impl Default for RedLockOptions {
    fn default() -> Self {
        Self {
            expiry: Duration::from_secs(8),
            tries: 32,
            retry_delay: RetryDelay::Uniform(Duration::from_millis(50), Duration::from_millis(250)),
            drift_factor: 0.01,
            timeout_factor: 0.05,
            value: OwnerValue::Random,
            fail_fast: false,
            shuffle: false,
            recreate_on_extend: false,
            max_hold: None,
        }
    }
}

impl fmt::Debug for RedLockOptions {
    /// Hides the value, which allows its owner to release the lock.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedLockOptions")
            .field("expiry", &self.expiry)
            .field("tries", &self.tries)
            .field("drift_factor", &self.drift_factor)
            .field("timeout_factor", &self.timeout_factor)
            .field("fail_fast", &self.fail_fast)
            .field("shuffle", &self.shuffle)
            .field("recreate_on_extend", &self.recreate_on_extend)
            .field("max_hold", &self.max_hold)
            .finish_non_exhaustive()
    }
}

impl RedLockOptions {
    /// Returns redsync's defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the TTL of the records. Default 8 s; 10 ms to 10 years. The records are renewed every
    /// third of it until the guard is released, unless an acquire has a
    /// [`lease`](crate::AcquireOptions::lease), which takes its place.
    pub fn expiry(mut self, expiry: Duration) -> Self {
        self.expiry = expiry;
        self
    }

    /// Sets the maximum number of rounds of an acquire whose wait has a limit. Without a limit, it
    /// is how many rounds may fail in a row: the acquire waits for a busy lock as long as it takes.
    /// Without a wait there is one round. Default 32, at least 1. RedLock-Hyperf: 2; node-redlock:
    /// 10 retries, which are 11 rounds.
    pub fn tries(mut self, tries: u32) -> Self {
        self.tries = tries;
        self
    }

    /// Sets the pause before each further round: random, between the two. Default 50 to 250 ms.
    /// RedLock-Hyperf: 100 to 200 ms; node-redlock: 100 to 300 ms.
    pub fn retry_delay(mut self, least: Duration, most: Duration) -> Self {
        self.retry_delay = RetryDelay::Uniform(least, most);
        self
    }

    /// Sets the pause before each further round as a function of the number of rounds made.
    pub fn retry_delay_of(
        mut self,
        delay: impl Fn(u32) -> Duration + Send + Sync + 'static,
    ) -> Self {
        self.retry_delay = RetryDelay::OfTry(Arc::new(delay));
        self
    }

    /// Sets the share of the TTL that the holder must not rely on, since clocks may run at
    /// different speeds; 2 ms are added. It also counts for a lease, and for one that
    /// [`extend`](crate::LockGuard::extend) sets. Default 0.01; 0 to 0.5. Less than 0.01 counts as
    /// 0.01.
    pub fn drift_factor(mut self, factor: f64) -> Self {
        self.drift_factor = factor;
        self
    }

    /// Sets how long a round waits for servers, as a share of the TTL. Default 0.05, which is 400
    /// ms of 8 s; above 0, at most 1. A round, an extension and a release take no longer, however
    /// many servers are silent; a round that fails may take as long again to release what a
    /// minority granted.
    pub fn timeout_factor(mut self, factor: f64) -> Self {
        self.timeout_factor = factor;
        self
    }

    /// Sets the value of the records, instead of a random one for each round: another process that
    /// knows it can extend and release the lock. For string records only. See
    /// [`AcquireOptions::value`](crate::AcquireOptions::value).
    pub fn value(mut self, value: impl Into<String>) -> Self {
        self.value = OwnerValue::Fixed(value.into());
        self
    }

    /// Sets a function that creates the value for each round. Make it unique, and hard to guess.
    pub fn value_generator(mut self, make: impl Fn() -> String + Send + Sync + 'static) -> Self {
        self.value = OwnerValue::Made(Arc::new(make));
        self
    }

    /// Sets whether a round ends as soon as its outcome is certain. Servers that have not replied
    /// by then are not part of the lock, so the lock survives fewer failures. Default off.
    pub fn fail_fast(mut self, on: bool) -> Self {
        self.fail_fast = on;
        self
    }

    /// Sets whether requests go out to the servers in random order. They are concurrent in any
    /// case. Default off.
    pub fn shuffle(mut self, on: bool) -> Self {
        self.shuffle = on;
        self
    }

    /// Sets whether [`LockGuard::extend`](crate::LockGuard::extend) also takes the lock on servers where it is free: one call
    /// makes a server that was restarted without its data part of the lock again. It does so only
    /// while most servers hold the lock: a lost lock is reported as lost, not recreated. Default
    /// off.
    pub fn recreate_on_extend(mut self, on: bool) -> Self {
        self.recreate_on_extend = on;
        self
    }

    /// Limits how long the lock is held; see [`AcquireOptions::max_hold`](crate::AcquireOptions::max_hold). Default: no limit.
    /// It also shortens a longer TTL, and with it the drift and the time limit of a round, which are
    /// shares of the TTL.
    pub fn max_hold(mut self, longest: Duration) -> Self {
        self.max_hold = Some(longest);
        self
    }

    pub(super) fn validate(mut self, name: &str) -> Result<Self> {
        let refuse = |reason: String| Err(Error::InvalidConfig { reason });
        self.expiry = checked_lease(name, self.expiry)?;
        if self.tries == 0 {
            return refuse("the number of tries is 0; use at least 1".into());
        }
        if !(0.0..=0.5).contains(&self.drift_factor) {
            return refuse(format!(
                "the drift factor is {}; use 0 to 0.5",
                self.drift_factor
            ));
        }
        if !(self.timeout_factor > 0.0 && self.timeout_factor <= 1.0) {
            return refuse(format!(
                "the timeout factor is {}; use a number above 0, at most 1",
                self.timeout_factor
            ));
        }
        match &self.retry_delay {
            RetryDelay::Uniform(least, most) if least > most => refuse(format!(
                "the retry delay is {least:?} to {most:?}; use a first limit that is at most the second"
            )),
            _ => Ok(self),
        }
    }

    /// Returns the pause after this many rounds, capped to what the clock can represent.
    pub(super) fn pause(&self, tries: u32) -> Duration {
        match &self.retry_delay {
            RetryDelay::Uniform(least, most) => {
                let [least, most] = [least, most].map(|delay| delay.min(&LONGEST_DELAY));
                *least + most.saturating_sub(*least).mul_f64(random_fraction())
            }
            RetryDelay::OfTry(delay) => delay(tries).min(LONGEST_DELAY),
        }
    }
}
