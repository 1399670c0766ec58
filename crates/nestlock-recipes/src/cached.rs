#![doc = include_str!("cached.md")]

mod error;
mod fill;
mod options;
mod store;

use std::{fmt, future::Future, time::Duration};

#[cfg(feature = "fred")]
pub use fred;
use nestlock::LockClient;

#[cfg(feature = "json")]
pub use self::store::Json;
#[cfg(feature = "fred")]
pub use self::store::RedisStore;
pub use self::{
    error::CacheError,
    store::{BoxError, Codec, Raw, Store},
};
use self::{fill::Filler, options::Options};

/// The longest TTL: higher values count as 10 years.
const LONGEST: Duration = Duration::from_secs(10 * 365 * 86_400);
/// The longest stale time: 49 days, since the envelope stores it as milliseconds in 32 bits.
const LONGEST_STALE: Duration = Duration::from_secs(49 * 86_400);

/// Creates a cache of bytes in this store, filled under locks of this client. For other values see
/// [`Cached::codec`]. Its use needs a tokio runtime with timers.
///
/// For an example, see [`Cached`].
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
        filler: Filler::new(client.clone(), store, Raw, options),
    }
}

/// A cache in which one caller fills each value, and all others wait for it. Created by
/// [`cached()`]. Cheap to clone. Clones share fills; use one cache per process.
///
/// ```no_run
/// # #[cfg(feature = "fred")]
/// # async fn example(client: nestlock::LockClient) -> Result<(), Box<dyn std::error::Error>> {
/// use std::{io, time::Duration};
///
/// use nestlock_recipes::cached::{RedisStore, cached};
///
/// let store = RedisStore::connect("redis://127.0.0.1:6379").await?; // where the locks are
/// let names = cached(&client, store).ttl(Duration::from_secs(60));
/// let load = async { Ok::<_, io::Error>(b"Ada".to_vec()) }; // runs at a miss
/// assert_eq!(names.try_get_with("name:7", load).await?, b"Ada");
/// # Ok(())
/// # }
/// ```
#[must_use]
pub struct Cached<S, C: Codec = Raw> {
    filler: Filler<S, C>,
}

impl<S: Store, C: Codec> Cached<S, C> {
    /// Sets the codec, for values other than bytes.
    pub fn codec<D: Codec>(self, codec: D) -> Cached<S, D> {
        Cached {
            filler: self.filler.with_codec(codec),
        }
    }

    /// Sets how long a value lasts. Default 60 s; 1 ms to 10 years.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.filler.options.ttl = ttl.min(LONGEST);
        self
    }

    /// Sets how long the cache remembers that a fill found no value. Default: not at all.
    pub fn none_ttl(mut self, ttl: Duration) -> Self {
        self.filler.options.none_ttl = Some(ttl.min(LONGEST));
        self
    }

    /// Sets how long no process tries a fill again after one has failed. Default 1 s. With zero,
    /// processes retry at once.
    pub fn error_ttl(mut self, ttl: Duration) -> Self {
        self.filler.options.error_ttl = ttl.min(LONGEST);
        self
    }

    /// Sets how long a value is still returned after it has expired, while it is refreshed in the
    /// background. Default: not at all; at most 49 days.
    pub fn stale_for(mut self, stale_for: Duration) -> Self {
        self.filler.options.stale_for = stale_for.min(LONGEST_STALE);
        self
    }

    /// Sets how early values are refreshed before they expire, in units of the time that a fill
    /// takes. Default 1. With zero, they are not refreshed early.
    pub fn beta(mut self, beta: f64) -> Self {
        self.filler.options.beta = beta;
        self
    }

    /// Sets how long it takes until another process fills a value if the process that was filling
    /// it dies. The lock is renewed every third of this time. Default 3 s; 10 ms to 10 years.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.filler.options.lease = lease;
        self
    }

    /// Sets how long to wait for a fill in another process. Default 30 s.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.filler.options.wait = wait;
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
        Ok(self.filler.read(key).await?.and_then(|found| found.value))
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
    #[expect(clippy::missing_panics_doc, reason = "it does not panic")]
    pub async fn try_get_with<E: Into<BoxError>>(
        &self,
        key: &str,
        fill: impl Future<Output = Result<C::Value, E>> + Send + 'static,
    ) -> Result<C::Value, CacheError> {
        let fill = async { fill.await.map(Some).map_err(Into::into) };
        let value = self.filler.get_or_fill(key, false, Box::pin(fill)).await?;
        Ok(value.expect("with `optional` false, a result without a value is never returned"))
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
        self.filler
            .get_or_fill(
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
            filler: self.filler.clone(),
        }
    }
}

impl<S, C: Codec> fmt::Debug for Cached<S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cached")
            .field("options", &self.filler.options)
            .finish_non_exhaustive()
    }
}
