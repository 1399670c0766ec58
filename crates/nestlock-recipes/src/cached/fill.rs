//! Who fills, who waits for it, and what is written.

use std::{
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::{Duration, Instant},
};

use dashmap::Entry;
use futures_util::{FutureExt, future::BoxFuture};
use nestlock::{AcquireOptions, Lock, LockGuard};
use tokio::{sync::watch, time::timeout};

use super::{
    BoxError, CacheError, Cached, Codec, Options, Store,
    store::{Envelope, failure, read_failure},
};

/// How long the store may take.
pub(super) const STORE_PATIENCE: Duration = Duration::from_secs(3);
/// How often who waits for a fill elsewhere looks whether it is done.
const LOOK: Duration = Duration::from_millis(500);
/// For how long a refresh that somebody else is at is not tried again.
const PAUSE: Duration = Duration::from_millis(100);
/// What a fill came to, for all who wait for it. `None`: there is no value.
pub(super) type Filled<V> = Result<Option<V>, CacheError>;
pub(super) type Fill<V> = BoxFuture<'static, Result<Option<V>, BoxError>>;

/// How far a fill is.
pub(super) enum Progress<V> {
    /// Somebody else may be filling.
    Waits,
    /// It has the lock.
    Fills,
    Done(Filled<V>),
}

/// What the store has for a key.
pub(super) struct Found<V> {
    pub(super) value: Option<V>,
    took: Duration,
    /// Until its end; then it is stale.
    fresh_for: Duration,
    /// Until it is gone.
    left: Duration,
}

impl<S: Store, C: Codec> Cached<S, C> {
    /// `optional`: that there is none is an answer.
    pub(super) async fn get_or_fill(&self, key: &str, optional: bool, fill: Fill<C::Value>) -> Filled<C::Value> {
        let (mut fill, began, wait) = (Some(fill), Instant::now(), self.options.wait);
        let mut comes_again = false;
        loop {
            let running = self.fills.get(key).map(|running| running.clone());
            if running.is_none()
                && let Some(found) = self.read(key).await?.filter(|found| self.is_answer(found, optional))
            {
                if let Some(fill) = fill.filter(|_| self.is_due(&found)) {
                    self.refresh(key, found.left, fill);
                }
                return Ok(found.value);
            }
            let mut running = running.unwrap_or_else(|| self.start(key, optional, began, &mut fill));
            // somebody else's fill, begun after we came, waits for longer than we
            if std::mem::replace(&mut comes_again, true) && fill.is_some() {
                let fills = running.wait_for(|progress| !matches!(progress, Progress::Waits));
                if timeout(wait.saturating_sub(began.elapsed()), fills).await.is_err() {
                    return Err(CacheError::Busy(wait));
                }
            }
            let filled = match running.wait_for(|progress| matches!(progress, Progress::Done(_))).await.as_deref() {
                Ok(Progress::Done(filled)) => filled.clone(),
                _ => Err(CacheError::Panicked),
            };
            match filled {
                // somebody else's fill, who does with none, has waited for longer than we, or has lost its lock
                Ok(None) if !optional => {}
                Err(error) if fill.is_some() && error.is_of_its_fill() && began.elapsed() < wait => {}
                filled => return filled,
            }
        }
    }

    /// The fill that runs, or else this one, in a task of its own.
    fn start(
        &self,
        key: &str,
        optional: bool,
        began: Instant,
        fill: &mut Option<Fill<C::Value>>,
    ) -> watch::Receiver<Progress<C::Value>> {
        let (sender, receiver) = watch::channel(Progress::Waits);
        // let go before the task is begun: a runtime that is closing drops it at once, with its landing
        match self.fills.entry(key.to_owned()) {
            Entry::Occupied(running) => return running.get().clone(),
            Entry::Vacant(none) => drop(none.insert(receiver.clone())),
        }
        let fill = fill.take().expect("taken by the fill that was waited for, which was the last turn");
        let landing = scopeguard::guard((self.clone(), key.to_owned()), |(this, key)| drop(this.fills.remove(&key)));
        tokio::spawn(async move {
            let (this, key) = &*landing;
            let filled = this.fill(key, optional, began, fill, &sender).await;
            // who comes from here on looks into the store
            drop(landing);
            sender.send_replace(Progress::Done(filled));
        });
        receiver
    }

    /// Reads again under the lock, and fills. Who asked `began` then.
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
            if let Some(guard) = lock.try_lock_for_with(left.min(LOOK), self.renewed()).await? {
                break guard;
            }
            // of many who wait, not each has to have the lock before it sees the value
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

    /// What there is without a fill, or that one failed a moment ago.
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
        // a value whose key is a marker's name is none
        let failed = failed.and_then(|(bytes, _)| read_failure(&bytes));
        failed.map_or(Ok(None), |message| Err(CacheError::FailedElsewhere(message)))
    }

    /// Fills anew in the background, unless somebody is at it, or was since `left` was read.
    fn refresh(&self, key: &str, left: Duration, fill: Fill<C::Value>) {
        if !self.refreshes.insert(key.to_owned()) {
            return;
        }
        let (this, running) = (self.clone(), Arc::clone(&self.refreshes));
        let landing = scopeguard::guard(key.to_owned(), move |key| drop(running.remove(&key)));
        tokio::spawn(async move {
            let key = &*landing;
            // readers of the stale value need not ask again before
            let pause = match this.refill(key, left, fill).await {
                Ok(true) => return,
                Ok(false) => PAUSE,
                Err(error) => {
                    tracing::warn!(key, %error, "a value was not refreshed");
                    this.options.error_ttl
                }
            };
            // nor need the store wait for that, and its connection
            drop(this);
            tokio::time::sleep(pause).await;
        });
    }

    /// `false`: somebody else is at it.
    async fn refill(&self, key: &str, left: Duration, fill: Fill<C::Value>) -> Result<bool, CacheError> {
        let Some(guard) = self.lock(key)?.try_lock_with(self.renewed()).await? else { return Ok(false) };
        self.fill_unless(|found| found.left > left, guard, key, fill).await.map(|_| true)
    }

    /// Reads again under the lock, fills if there is no answer still, and lets the lock go.
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
        // the next one may look; that the lock was lost is no news, what was filled is written or not
        let _ = guard.unlock().await;
        filled
    }

    /// Fills and writes, while the lock is held.
    async fn fill_under(&self, guard: &LockGuard, key: &str, fill: Fill<C::Value>) -> Filled<C::Value> {
        let Options { ttl, none_ttl, error_ttl, stale_for, .. } = self.options;
        let began = Instant::now();
        // a codec of the user's may panic, too
        let made = AssertUnwindSafe(async {
            let value = fill.await?;
            let bytes = value.as_ref().map(|value| self.codec.encode(value)).transpose()?;
            Ok::<_, BoxError>((value, bytes))
        });
        let error = match guard.run_until_lost(made.catch_unwind()).await? {
            Ok(Ok((value, bytes))) => {
                let ttl = if bytes.is_some() { Some(ttl) } else { none_ttl };
                // not kept, but what stands there is over
                let (ttl, stale_for) = ttl.map(|ttl| (ttl, stale_for)).unwrap_or_default();
                let envelope = Envelope { took: began.elapsed(), stale_for, value: bytes };
                self.write(guard, key, envelope.write(), ttl.saturating_add(stale_for)).await;
                return Ok(value);
            }
            Ok(Err(error)) => CacheError::Fill(error.into()),
            Err(_) => CacheError::Panicked,
        };
        if !error_ttl.is_zero() {
            let cause = if let CacheError::Fill(cause) = &error { cause.to_string() } else { error.to_string() };
            self.write(guard, &marker(key), failure(&cause), error_ttl).await;
        }
        Err(error)
    }

    /// What is not written is filled again by the next who asks.
    async fn write(&self, guard: &LockGuard, key: &str, bytes: Vec<u8>, ttl: Duration) {
        if guard.is_lost() {
            return;
        }
        match in_time(self.store.set(key, bytes, ttl, guard)).await {
            Ok(true) => {}
            Ok(false) => tracing::warn!(key, "not cached: the lock of its fill is not held any more"),
            Err(error) => tracing::warn!(key, %error, "not cached"),
        }
    }

    pub(super) async fn read(&self, key: &str) -> Result<Option<Found<C::Value>>, CacheError> {
        let Some((bytes, left)) = in_time(self.store.get(key)).await? else { return Ok(None) };
        let Some(Envelope { took, stale_for, value }) = Envelope::read(&bytes) else { return Ok(None) };
        // what the codec cannot read, or panics at, is missing
        let decode = |bytes| catch_unwind(AssertUnwindSafe(|| self.codec.decode(bytes))).ok().flatten();
        let Some(value) = value.map_or(Some(None), |bytes| decode(bytes).map(Some)) else { return Ok(None) };
        Ok(Some(Found { value, took, fresh_for: left.saturating_sub(stale_for), left }))
    }

    /// That there is none stands there for a moment even where it is not cached.
    fn is_answer(&self, found: &Found<C::Value>, optional: bool) -> bool {
        found.value.is_some() || optional && self.options.none_ttl.is_some()
    }

    /// Whether this read is the one that fills it anew. When it is stale, each is; of those one gets the lock.
    fn is_due(&self, found: &Found<C::Value>) -> bool {
        found.fresh_for.is_zero() || is_early(found.took, found.fresh_for, self.options.beta, 1.0 - fastrand::f64())
    }

    fn lock(&self, key: &str) -> Result<Lock, CacheError> {
        Ok(self.client.mutex(format!("fill:{key}"))?)
    }

    fn renewed(&self) -> AcquireOptions {
        AcquireOptions::new().watchdog_timeout(self.options.lease)
    }
}

/// A store that does not answer must not keep the lock for ever.
async fn in_time<T>(call: impl Future<Output = Result<T, BoxError>>) -> Result<T, CacheError> {
    let answer = timeout(STORE_PATIENCE, call).await;
    let answer = answer.unwrap_or_else(|_| Err(format!("no answer within {STORE_PATIENCE:?}").into()));
    answer.map_err(|error| CacheError::Store(error.into()))
}

/// XFetch, for a lot above 0 and at most 1.
fn is_early(took: Duration, left: Duration, beta: f64, lot: f64) -> bool {
    took.as_secs_f64() * beta * -lot.ln() >= left.as_secs_f64()
}

fn marker(key: &str) -> String {
    format!("{key}:failed")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The share of all lots that refresh is `exp(-left / (beta * took))`.
    #[test]
    fn the_nearer_the_end_the_more_reads_refresh() {
        let took = Duration::from_millis(400);
        let of_10_000 = |left, beta| {
            (1..=10_000)
                .filter(|lot| is_early(took, Duration::from_millis(left), beta, f64::from(*lot) / 10_000.0))
                .count()
        };
        let shares =
            [(2_000, 1.0), (400, 1.0), (40, 1.0), (2_000, 5.0), (1, 0.0)].map(|(left, beta)| of_10_000(left, beta));
        assert_eq!(shares, [67, 3678, 9048, 3678, 0]);
    }
}
