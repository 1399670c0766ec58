//! Chooses the caller that fills a value, lets the others wait for it, and writes the result.

use std::{
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::{Duration, Instant},
};

use dashmap::{DashMap, DashSet, Entry};
use futures_util::{FutureExt, future::BoxFuture};
use nestlock::{AcquireOptions, Lock, LockClient, LockGuard};
use tokio::{sync::watch, time::timeout};

use super::{
    error::CacheError,
    options::Options,
    store::{BoxError, Codec, Envelope, STORE_PATIENCE, Store, failure, read_failure},
};

/// How often a caller that waits for a fill in another process checks whether it is done.
const LOOK: Duration = Duration::from_millis(500);
/// How long this process does not retry a refresh that another process has begun.
const PAUSE: Duration = Duration::from_millis(100);
/// The result of a fill, for all callers that wait for it. `None`: there is no value.
type Filled<V> = Result<Option<V>, CacheError>;
type Fill<V> = BoxFuture<'static, Result<Option<V>, BoxError>>;

/// The progress of a fill.
enum Progress<V> {
    /// It waits for the lock: another process may be filling.
    Waits,
    /// It has the lock.
    Fills,
    Done(Filled<V>),
}

/// The entry in the store for a key.
pub(super) struct Found<V> {
    pub(super) value: Option<V>,
    took: Duration,
    /// The time until its end; from then on it is stale.
    fresh_for: Duration,
    /// The time until the store deletes it.
    left: Duration,
}

/// Fills the values of one cache. Clones share fills.
pub(super) struct Filler<S, C: Codec> {
    client: LockClient,
    store: Arc<S>,
    codec: Arc<C>,
    pub(super) options: Options,
    /// The fills of this process that callers wait for, by key.
    fills: Arc<DashMap<String, watch::Receiver<Progress<C::Value>>>>,
    /// The keys that this process refreshes in the background.
    refreshes: Arc<DashSet<String>>,
}

impl<S, C: Codec> Filler<S, C> {
    pub(super) fn new(client: LockClient, store: S, codec: C, options: Options) -> Self {
        Self {
            client,
            store: Arc::new(store),
            codec: Arc::new(codec),
            options,
            fills: Arc::default(),
            refreshes: Arc::default(),
        }
    }

    /// Replaces the codec. The result shares no fills with clones that have the old one.
    pub(super) fn with_codec<D: Codec>(self, codec: D) -> Filler<S, D> {
        let Self {
            client,
            store,
            options,
            ..
        } = self;
        Filler {
            client,
            store,
            codec: Arc::new(codec),
            options,
            fills: Arc::default(),
            refreshes: Arc::default(),
        }
    }
}

impl<S, C: Codec> Clone for Filler<S, C> {
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

impl<S: Store, C: Codec> Filler<S, C> {
    /// Returns the value, or fills it. With `optional`, "no value" is a valid result.
    pub(super) async fn get_or_fill(
        &self,
        key: &str,
        optional: bool,
        fill: Fill<C::Value>,
    ) -> Filled<C::Value> {
        let (mut fill, began, wait) = (Some(fill), Instant::now(), self.options.wait);
        let mut comes_again = false;
        loop {
            let running = self.fills.get(key).map(|running| running.clone());
            if running.is_none()
                && let Some(found) = self
                    .read(key)
                    .await?
                    .filter(|found| self.is_answer(found, optional))
            {
                if let Some(fill) = fill.filter(|_| self.is_due(&found)) {
                    self.refresh(key, found.left, fill);
                }
                return Ok(found.value);
            }
            let mut running =
                running.unwrap_or_else(|| self.start(key, optional, began, &mut fill));
            // a fill that began after this call may wait for the lock longer than this call may
            if std::mem::replace(&mut comes_again, true) && fill.is_some() {
                let fills = running.wait_for(|progress| !matches!(progress, Progress::Waits));
                if timeout(wait.saturating_sub(began.elapsed()), fills)
                    .await
                    .is_err()
                {
                    return Err(CacheError::Busy(wait));
                }
            }
            let filled = match running
                .wait_for(|progress| matches!(progress, Progress::Done(_)))
                .await
                .as_deref()
            {
                Ok(Progress::Done(filled)) => filled.clone(),
                _ => Err(CacheError::Panicked),
            };
            match filled {
                // the fill of another caller: it found no value and that caller accepts this, or it
                // timed out, or it lost its lock
                Ok(None) if !optional => {}
                Err(error)
                    if fill.is_some() && error.is_of_its_fill() && began.elapsed() < wait => {}
                filled => return filled,
            }
        }
    }

    /// Returns the progress of the fill that runs; otherwise starts this one, in its own task.
    fn start(
        &self,
        key: &str,
        optional: bool,
        began: Instant,
        fill: &mut Option<Fill<C::Value>>,
    ) -> watch::Receiver<Progress<C::Value>> {
        let (sender, receiver) = watch::channel(Progress::Waits);
        // release the map entry before the spawn: a runtime that is shutting down drops the task at
        // once, and the drop of `landing` locks the map
        match self.fills.entry(key.to_owned()) {
            Entry::Occupied(running) => return running.get().clone(),
            Entry::Vacant(none) => drop(none.insert(receiver.clone())),
        }
        let fill = fill
            .take()
            .expect("a call that has started its own fill returns its result and starts no other");
        let landing = scopeguard::guard((self.clone(), key.to_owned()), |(this, key)| {
            drop(this.fills.remove(&key));
        });
        tokio::spawn(async move {
            let (this, key) = &*landing;
            let filled = this.fill(key, optional, began, fill, &sender).await;
            // out of the map before the result is published: later callers then read the store
            drop(landing);
            sender.send_replace(Progress::Done(filled));
        });
        receiver
    }

    /// Acquires the lock, reads again under it, and fills. `began` is when the caller began to
    /// wait.
    async fn fill(
        &self,
        key: &str,
        optional: bool,
        began: Instant,
        fill: Fill<C::Value>,
        progress: &watch::Sender<Progress<C::Value>>,
    ) -> Filled<C::Value> {
        let (lock, wait) = (self.lock(key)?, self.options.wait);
        let is_answer = |found: &Found<C::Value>| self.is_answer(found, optional);
        let guard = loop {
            let left = wait.saturating_sub(began.elapsed());
            if let Some(guard) = lock
                .try_lock_for_with(left.min(LOOK), self.renewed())
                .await?
            {
                break guard;
            }
            // without this, each of many waiters would need the lock before it sees the value
            if let Some(value) = self.look(key, is_answer).await? {
                return Ok(value);
            }
            if began.elapsed() >= wait {
                return Err(CacheError::Busy(wait));
            }
        };
        progress.send_replace(Progress::Fills);
        self.fill_unless(is_answer, guard, key, fill).await
    }

    /// Returns the value if the store has it. Fails if a fill failed a moment ago.
    async fn look(
        &self,
        key: &str,
        is_answer: impl Fn(&Found<C::Value>) -> bool,
    ) -> Result<Option<Option<C::Value>>, CacheError> {
        let marker = marker(key);
        let (found, failed) = tokio::try_join!(self.read(key), in_time(self.store.get(&marker)))?;
        if let Some(found) = found.filter(is_answer) {
            return Ok(Some(found.value));
        }
        // ignores a real value whose key happens to be the name of a marker
        let failed = failed.and_then(|(bytes, _)| read_failure(&bytes));
        failed.map_or(Ok(None), |message| {
            Err(CacheError::FailedElsewhere(message))
        })
    }

    /// Refreshes a value in the background, unless it is being refreshed here or in another
    /// process, or has been since `left` was read.
    fn refresh(&self, key: &str, left: Duration, fill: Fill<C::Value>) {
        if !self.refreshes.insert(key.to_owned()) {
            return;
        }
        let (this, running) = (self.clone(), Arc::clone(&self.refreshes));
        let landing = scopeguard::guard(key.to_owned(), move |key| drop(running.remove(&key)));
        tokio::spawn(async move {
            let key = &*landing;
            // until the end of this pause, readers of the stale value start no further refresh
            let pause = match this.refill(key, left, fill).await {
                Ok(true) => return,
                Ok(false) => PAUSE,
                Err(error) => {
                    tracing::warn!(key, %error, "the refresh of a value failed");
                    this.options.error_ttl
                }
            };
            // the pause must not keep the store and its connection alive
            drop(this);
            tokio::time::sleep(pause).await;
        });
    }

    /// Refreshes a value. Returns `false` if another process is filling it.
    async fn refill(
        &self,
        key: &str,
        left: Duration,
        fill: Fill<C::Value>,
    ) -> Result<bool, CacheError> {
        let Some(guard) = self.lock(key)?.try_lock_with(self.renewed()).await? else {
            return Ok(false);
        };
        self.fill_unless(|found| found.left > left, guard, key, fill)
            .await
            .map(|_| true)
    }

    /// Reads again under the lock, fills if there is still no valid entry, and releases the lock.
    async fn fill_unless(
        &self,
        is_answer: impl Fn(&Found<C::Value>) -> bool,
        guard: LockGuard,
        key: &str,
        fill: Fill<C::Value>,
    ) -> Filled<C::Value> {
        let filled = match self.look(key, is_answer).await {
            Ok(Some(value)) => Ok(value),
            Ok(None) => self.fill_under(&guard, key, fill).await,
            Err(error) => Err(error),
        };
        // a lost lock is not an error of the caller: it has its value, stored or not
        let _ = guard.unlock().await;
        filled
    }

    /// Runs the fill and writes its result, while the lock is held.
    async fn fill_under(
        &self,
        guard: &LockGuard,
        key: &str,
        fill: Fill<C::Value>,
    ) -> Filled<C::Value> {
        let Options {
            ttl,
            none_ttl,
            error_ttl,
            stale_for,
            ..
        } = self.options;
        let began = Instant::now();
        // the fill or the codec of the user may panic
        let made = AssertUnwindSafe(async {
            let value = fill.await?;
            let bytes = value
                .as_ref()
                .map(|value| self.codec.encode(value))
                .transpose()?;
            Ok::<_, BoxError>((value, bytes))
        });
        let error = match guard.run_until_lost(made.catch_unwind()).await? {
            Ok(Ok((value, bytes))) => {
                let ttl = if bytes.is_some() { Some(ttl) } else { none_ttl };
                // "no value" is not cached then, but the old entry must end: overwrite it with the
                // shortest TTL
                let (ttl, stale_for) = ttl.map(|ttl| (ttl, stale_for)).unwrap_or_default();
                let envelope = Envelope {
                    took: began.elapsed(),
                    stale_for,
                    value: bytes,
                };
                self.write(guard, key, envelope.write(), ttl.saturating_add(stale_for))
                    .await;
                return Ok(value);
            }
            Ok(Err(error)) => CacheError::Fill(error.into()),
            Err(_) => CacheError::Panicked,
        };
        if !error_ttl.is_zero() {
            let cause = if let CacheError::Fill(cause) = &error {
                cause.to_string()
            } else {
                error.to_string()
            };
            self.write(guard, &marker(key), failure(&cause), error_ttl)
                .await;
        }
        Err(error)
    }

    /// Writes an entry. If that fails, the next caller fills the value again.
    async fn write(&self, guard: &LockGuard, key: &str, bytes: Vec<u8>, ttl: Duration) {
        if guard.is_lost() {
            return;
        }
        match in_time(self.store.set(key, bytes, ttl, guard)).await {
            Ok(true) => {}
            Ok(false) => {
                tracing::warn!(
                    key,
                    "a value was not cached: the lock of its fill is no longer held"
                );
            }
            Err(error) => tracing::warn!(key, %error, "a value was not cached: the store failed"),
        }
    }

    pub(super) async fn read(&self, key: &str) -> Result<Option<Found<C::Value>>, CacheError> {
        let Some((bytes, left)) = in_time(self.store.get(key)).await? else {
            return Ok(None);
        };
        let Some(Envelope {
            took,
            stale_for,
            value,
        }) = Envelope::read(&bytes)
        else {
            return Ok(None);
        };
        // an entry that the codec cannot decode, or panics at, counts as missing
        let decode = |bytes| {
            catch_unwind(AssertUnwindSafe(|| self.codec.decode(bytes)))
                .ok()
                .flatten()
        };
        let Some(value) = value.map_or(Some(None), |bytes| decode(bytes).map(Some)) else {
            return Ok(None);
        };
        Ok(Some(Found {
            value,
            took,
            fresh_for: left.saturating_sub(stale_for),
            left,
        }))
    }

    /// Returns whether the entry is a valid result. A "no value" entry without `none_ttl` is not:
    /// it exists only for a moment, to end an older value.
    fn is_answer(&self, found: &Found<C::Value>, optional: bool) -> bool {
        found.value.is_some() || optional && self.options.none_ttl.is_some()
    }

    /// Returns whether this read starts a refresh. Each read of a stale value does, and only one of
    /// them gets the lock.
    fn is_due(&self, found: &Found<C::Value>) -> bool {
        found.fresh_for.is_zero()
            || is_early(
                found.took,
                found.fresh_for,
                self.options.beta,
                1.0 - fastrand::f64(),
            )
    }

    fn lock(&self, key: &str) -> Result<Lock, CacheError> {
        Ok(self.client.mutex(format!("fill:{key}"))?)
    }

    fn renewed(&self) -> AcquireOptions {
        AcquireOptions::new().watchdog_timeout(self.options.lease)
    }
}

/// Limits a call of the store: one that does not reply must not hold the lock forever.
async fn in_time<T>(call: impl Future<Output = Result<T, BoxError>>) -> Result<T, CacheError> {
    let answer = timeout(STORE_PATIENCE, call).await;
    let answer =
        answer.unwrap_or_else(|_| Err(format!("no reply within {STORE_PATIENCE:?}").into()));
    answer.map_err(|error| CacheError::Store(error.into()))
}

/// XFetch: returns whether to refresh early, for a random `lot` above 0 and at most 1.
fn is_early(took: Duration, left: Duration, beta: f64, lot: f64) -> bool {
    took.as_secs_f64() * beta * -lot.ln() >= left.as_secs_f64()
}

fn marker(key: &str) -> String {
    format!("{key}:failed")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The share of reads that refresh is `exp(-left / (beta * took))`.
    #[test]
    fn the_nearer_the_end_the_more_reads_refresh() {
        let took = Duration::from_millis(400);
        let of_10_000 = |left, beta| {
            (1..=10_000)
                .filter(|lot| {
                    is_early(
                        took,
                        Duration::from_millis(left),
                        beta,
                        f64::from(*lot) / 10_000.0,
                    )
                })
                .count()
        };
        let shares = [(2_000, 1.0), (400, 1.0), (40, 1.0), (2_000, 5.0), (1, 0.0)]
            .map(|(left, beta)| of_10_000(left, beta));
        assert_eq!(shares, [67, 3678, 9048, 3678, 0]);
    }
}
