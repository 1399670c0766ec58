#![doc = include_str!("cached.md")]

mod fill;
mod store;

use std::{fmt, future::Future, sync::Arc, time::Duration};

use dashmap::{DashMap, DashSet};
#[cfg(feature = "fred")]
pub use fred;
use nestlock::LockClient;
use tokio::sync::watch;

use self::fill::Progress;
#[cfg(feature = "json")]
pub use self::store::Json;
#[cfg(feature = "fred")]
pub use self::store::RedisStore;
pub use self::store::{BoxError, Codec, Raw, Store};

/// The longest TTL: higher values count as 10 years.
const LONGEST: Duration = Duration::from_secs(10 * 365 * 86_400);
/// The longest stale time: 49 days, since the envelope stores it as milliseconds in 32 bits.
const LONGEST_STALE: Duration = Duration::from_secs(49 * 86_400);

/// Creates a cache of bytes in this store, filled under locks of this client. For other values see
/// [`Cached::codec`]. Its use needs a tokio runtime with timers.
pub fn cached<S: Store>(client: &LockClient, store: S) -> Cached<S> {
    let options = Options {
        ttl: Duration::from_secs(60),
        none_ttl: None,
        error_ttl: Duration::from_secs(1),
        stale_for: Duration::ZERO,
        beta: 1.0,
        lease: Duration::from_secs(3),
        wait: Duration::from_secs(30),
    };
    Cached {
        client: client.clone(),
        store: Arc::new(store),
        codec: Arc::new(Raw),
        options,
        fills: Arc::default(),
        refreshes: Arc::default(),
    }
}

/// A cache in which one caller fills each value, however many wait for it. Created by [`cached()`].
/// Cheap to clone. Clones share fills; use one cache per process.
#[must_use]
pub struct Cached<S, C: Codec = Raw> {
    client: LockClient,
    store: Arc<S>,
    codec: Arc<C>,
    options: Options,
    /// The fills of this process that callers wait for, by key.
    fills: Arc<DashMap<String, watch::Receiver<Progress<C::Value>>>>,
    /// The keys that this process refreshes in the background.
    refreshes: Arc<DashSet<String>>,
}

#[derive(Debug, Clone)]
struct Options {
    ttl: Duration,
    none_ttl: Option<Duration>,
    error_ttl: Duration,
    stale_for: Duration,
    beta: f64,
    lease: Duration,
    wait: Duration,
}

/// Why a call returns no value.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// The fill returned this error. All callers that waited for the fill get it.
    #[error("the fill failed: {0}")]
    Fill(#[source] Arc<dyn std::error::Error + Send + Sync>),
    /// A fill of this key failed with this message less than [`Cached::error_ttl`] ago. Try again
    /// later.
    #[error("a fill failed a moment ago, and is not tried again yet: {0}")]
    FailedElsewhere(Arc<str>),
    /// Another caller was filling it for all of [`Cached::wait`].
    #[error("somebody else has been filling it for {0:?}")]
    Busy(Duration),
    /// The lock of the fill failed: the key is not valid as a name, the server does not reply, or
    /// the lock was lost and the fill dropped. After a loss, a caller that shared the fill gets
    /// this error only if its own [`Cached::wait`] is over; otherwise it fills the value itself.
    #[error("the lock of the fill: {0}")]
    Lock(#[source] Arc<nestlock::Error>),
    /// The store could not be read, or took longer than 3 s.
    #[error("the cache's store: {0}")]
    Store(#[source] Arc<dyn std::error::Error + Send + Sync>),
    /// The fill panicked, or its runtime has ended.
    #[error("the fill panicked, or its runtime has ended")]
    Panicked,
}

impl CacheError {
    /// Returns whether the error is about one fill only: callers that waited for that fill have
    /// fills of their own, and run those.
    fn is_of_its_fill(&self) -> bool {
        match self {
            Self::Busy(_) => true,
            Self::Lock(error) => error.is_lost(),
            _ => false,
        }
    }
}

impl From<nestlock::Error> for CacheError {
    fn from(error: nestlock::Error) -> Self {
        Self::Lock(Arc::new(error))
    }
}

impl<S: Store, C: Codec> Cached<S, C> {
    /// Sets the codec, for values other than bytes.
    pub fn codec<D: Codec>(self, codec: D) -> Cached<S, D> {
        let Self {
            client,
            store,
            options,
            ..
        } = self;
        Cached {
            client,
            store,
            codec: Arc::new(codec),
            options,
            fills: Arc::default(),
            refreshes: Arc::default(),
        }
    }

    /// Sets how long a value lasts. Default 60 s; 1 ms to 10 years.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.options.ttl = ttl.min(LONGEST);
        self
    }

    /// Sets how long the cache remembers that a fill found no value. Default: not at all.
    pub fn none_ttl(mut self, ttl: Duration) -> Self {
        self.options.none_ttl = Some(ttl.min(LONGEST));
        self
    }

    /// Sets how long no process tries a fill again after one has failed. Default 1 s. With zero,
    /// processes retry at once.
    pub fn error_ttl(mut self, ttl: Duration) -> Self {
        self.options.error_ttl = ttl.min(LONGEST);
        self
    }

    /// Sets how long after its end a value is still returned, while it is refreshed in the
    /// background. Default: not at all; at most 49 days.
    pub fn stale_for(mut self, stale_for: Duration) -> Self {
        self.options.stale_for = stale_for.min(LONGEST_STALE);
        self
    }

    /// Sets how early values are refreshed before their end, in units of the time that a fill
    /// takes. Default 1. With zero, they are not refreshed early.
    pub fn beta(mut self, beta: f64) -> Self {
        self.options.beta = beta;
        self
    }

    /// Sets after how long another process fills a value if the process that was filling it has
    /// died. The lock is renewed every third of this time. Default 3 s; 10 ms to 10 years.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.options.lease = lease;
        self
    }

    /// Sets how long to wait for a fill in another process. Default 30 s.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.options.wait = wait;
        self
    }

    /// Returns the value at this key, fresh or stale. Never fills it.
    ///
    /// # Errors
    ///
    /// [`CacheError::Store`].
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn get(&self, key: &str) -> Result<Option<C::Value>, CacheError> {
        Ok(self.read(key).await?.and_then(|found| found.value))
    }

    /// Returns the value at this key, or the result of `fill`. Of all concurrent callers, in all
    /// processes, one fills.
    ///
    /// # Errors
    ///
    /// [`CacheError`]. If the store or the locks are unreachable, nothing is filled: otherwise all
    /// callers would load the source at once.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: a fill that has begun continues in its own task.
    #[expect(clippy::missing_panics_doc, reason = "it does not")]
    pub async fn try_get_with<E: Into<BoxError>>(
        &self,
        key: &str,
        fill: impl Future<Output = Result<C::Value, E>> + Send + 'static,
    ) -> Result<C::Value, CacheError> {
        let fill = async { fill.await.map(Some).map_err(Into::into) };
        let value = self.get_or_fill(key, false, Box::pin(fill)).await?;
        Ok(value.expect("a fill of a value has one, and others do not count"))
    }

    /// As [`try_get_with`](Self::try_get_with), for a fill that may find no value.
    /// [`none_ttl`](Self::none_ttl) caches that result; without it, each process fills for itself,
    /// one after the other, and some may get [`Busy`](CacheError::Busy).
    ///
    /// # Errors
    ///
    /// As [`try_get_with`](Self::try_get_with).
    ///
    /// # Cancel safety
    ///
    /// As [`try_get_with`](Self::try_get_with).
    pub async fn try_optionally_get_with<E: Into<BoxError>>(
        &self,
        key: &str,
        fill: impl Future<Output = Result<Option<C::Value>, E>> + Send + 'static,
    ) -> Result<Option<C::Value>, CacheError> {
        self.get_or_fill(
            key,
            true,
            Box::pin(async { fill.await.map_err(Into::into) }),
        )
        .await
    }
}

impl<S, C: Codec> Clone for Cached<S, C> {
    fn clone(&self) -> Self {
        Self {
            client: self.client.clone(),
            store: Arc::clone(&self.store),
            codec: Arc::clone(&self.codec),
            options: self.options.clone(),
            fills: Arc::clone(&self.fills),
            refreshes: Arc::clone(&self.refreshes),
        }
    }
}

impl<S, C: Codec> fmt::Debug for Cached<S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cached")
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}
