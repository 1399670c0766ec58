//! A client's calls of a credential provider, and which connections a call serves.

use std::{
    collections::HashMap,
    fmt, mem,
    panic::{self, AssertUnwindSafe},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use futures_util::future::join_all;
use tokio::{
    runtime::Builder,
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::timeout,
};

use crate::{
    address::Address,
    clock::Instant,
    credentials::{CredentialProvider, Credentials, Login},
    error::StoreErrorKind,
    failure::NotConnected,
};

/// Most calls of a provider at the same time. Others wait, within the time of their connect.
const CALLS: usize = 16;

/// How long the credentials of one call serve other connections as well: a client makes several, and
/// a provider that takes a second must not take it for each.
const SHARED: Duration = Duration::from_secs(5);

/// The shortest time after which credentials are replaced: a lifetime of zero must not keep the
/// provider busy.
const SHORTEST: Duration = Duration::from_millis(50);

/// A credential provider, and one client's calls of it.
///
/// For an example, see [`CredentialProvider`].
#[derive(Clone)]
pub struct CredentialSource {
    pub(crate) provider: Arc<dyn CredentialProvider>,
    /// Limits the calls that have not returned.
    permits: Arc<Semaphore>,
    calls: Arc<Mutex<HashMap<Option<Address>, Calls>>>,
}

impl<P: CredentialProvider + 'static> From<P> for CredentialSource {
    fn from(provider: P) -> Self {
        Self::new(Arc::new(provider))
    }
}

impl fmt::Debug for CredentialSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CredentialSource(..)")
    }
}

impl CredentialSource {
    fn new(provider: Arc<dyn CredentialProvider>) -> Self {
        Self {
            provider,
            permits: Arc::new(Semaphore::new(CALLS)),
            calls: Arc::default(),
        }
    }

    /// Returns the same provider for another client: calls of this one that never return do not
    /// count there. In a forked child, no call of the parent returns.
    #[must_use]
    pub fn for_another_client(&self) -> Self {
        Self::new(Arc::clone(&self.provider))
    }

    /// Returns the calls for this server.
    fn calls(&self, address: &Address) -> Calls {
        let by_server = self.provider.is_by_server().then(|| address.clone());
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls.entry(by_server).or_default().clone()
    }

    /// Waits until no call is in flight, but not longer than `hangs`. Returns whether one was.
    pub(crate) async fn wait(&self, hangs: Duration) -> bool {
        let all: Vec<_> = {
            let calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
            calls.values().map(|calls| calls.0.subscribe()).collect()
        };
        let mut in_flight: Vec<_> = all
            .into_iter()
            .filter(|calls| calls.borrow().in_flight.is_some())
            .collect();
        // the result of `wait_for` holds a lock
        let each = in_flight.iter_mut().map(async |calls| {
            _ = calls.wait_for(|calls| calls.in_flight.is_none()).await;
        });
        _ = timeout(hangs, join_all(each)).await;
        !in_flight.is_empty()
    }

    /// Logs in to a server. If it refuses the credentials, tries again with those of a later call,
    /// up to `tries` times in all: a token may have been replaced in the meantime. `hangs`: as for
    /// [`fetched`](Self::fetched).
    pub(crate) async fn log_in<T, F>(
        &self,
        address: &Address,
        hangs: Duration,
        mut tries: u32,
        log_in: impl Fn(Login) -> F,
    ) -> Result<(T, Fetched), NotConnected>
    where
        F: Future<Output = Result<T, NotConnected>>,
    {
        let mut refused = None;
        loop {
            let fetched = self.fetched(address, hangs, refused).await?;
            tries = tries.saturating_sub(1);
            match log_in(fetched.credentials.login.clone()).await {
                Err(error) if error.is_login_refused() && tries > 0 => refused = Some(fetched.at),
                outcome => return Ok((outcome?, fetched)),
            }
        }
    }

    /// Calls the provider, or takes what a call for another connection returns, or has returned a
    /// moment ago. A call that has taken longer than `hangs` may hang: another one is made next to
    /// it, and the first that returns serves all that wait. If a server has `refused` the
    /// credentials of a call, only a later one serves.
    async fn fetched(
        &self,
        address: &Address,
        hangs: Duration,
        refused: Option<Instant>,
    ) -> Result<Fetched, NotConnected> {
        let asked = Instant::now();
        let calls = self.calls(address);
        let mut news = calls.0.subscribe();
        loop {
            let in_flight = {
                let calls = news.borrow_and_update();
                if let Some(outcome) = calls.outcome(asked, refused) {
                    return outcome;
                }
                calls.in_flight
            };
            let left = in_flight.map(|made| hangs.saturating_sub(made.elapsed()));
            if let Some(left) = left.filter(|left| !left.is_zero()) {
                _ = timeout(left, news.changed()).await;
                continue;
            }
            // Calls that block forever must not take ever more threads. The semaphore is never
            // closed.
            let Ok(permit) = Arc::clone(&self.permits).acquire_owned().await else {
                continue;
            };
            let now = Instant::now();
            // another connection may have made one in the meantime
            let is_made = calls.0.send_if_modified(|calls| {
                let is_next =
                    calls.in_flight == in_flight && calls.outcome(asked, refused).is_none();
                if is_next {
                    calls.in_flight = Some(now);
                }
                is_next
            });
            if is_made {
                self.call(&calls, address, now, permit);
            }
        }
    }

    /// Calls the provider on a thread of its own, with a runtime of its own: code of the program
    /// must not block the thread that keeps the connections, and may outlive it.
    fn call(&self, calls: &Calls, address: &Address, made: Instant, permit: OwnedSemaphorePermit) {
        let (provider, address, ends) =
            (Arc::clone(&self.provider), address.clone(), calls.clone());
        let call = move || {
            let outcome = contained(|| fetch(&*provider, &address, &ends));
            ends.end(
                made,
                outcome.unwrap_or_else(|| Some(failed("the credential provider panicked"))),
            );
            // the last owner of what the program passed, if the client is gone
            contained(move || drop(provider));
            drop(permit);
        };
        if let Err(error) = thread::Builder::new()
            .name("credentials".into())
            .spawn(call)
        {
            let why = format!("cannot start a thread: {error}");
            calls.end(made, Some(failed(why)));
        }
    }
}

/// Calls the provider. Returns `None` if no connection waits for it any more.
fn fetch(
    provider: &dyn CredentialProvider,
    address: &Address,
    calls: &Calls,
) -> Option<Result<Credentials, NotConnected>> {
    let runtime = match Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return Some(failed(format!("cannot start a runtime: {error}"))),
    };
    let fetched = contained(|| {
        runtime.block_on(async {
            tokio::select! {
                biased;
                () = calls.0.closed() => None,
                fetched = provider.fetch(address) => Some(fetched),
            }
        })
    });
    // A task that the program left behind must not delay the result. Dropped while it unwinds, the
    // runtime would wait for it.
    contained(|| runtime.shutdown_background());
    fetched.unwrap_or_else(|| Some(failed("the credential provider panicked")))
}

fn failed(why: impl Into<String>) -> Result<Credentials, NotConnected> {
    Err(NotConnected::new(StoreErrorKind::Unavailable, why.into()))
}

/// Runs code of the program. Returns `None` if it panics. The panic is forgotten, since its own
/// drop may panic, and would then end the process.
fn contained<T>(code: impl FnOnce() -> T) -> Option<T> {
    panic::catch_unwind(AssertUnwindSafe(code))
        .map_err(mem::forget)
        .ok()
}

/// The calls for a server, or for all of them. A connection that waits for one has a receiver.
#[derive(Clone, Default)]
struct Calls(Arc<watch::Sender<CallState>>);

impl Calls {
    /// Ends a call. `None`: no connection waited for it.
    fn end(&self, made: Instant, outcome: Option<Result<Credentials, NotConnected>>) {
        self.0.send_modify(|calls| calls.end(made, outcome));
    }
}

#[derive(Default)]
struct CallState {
    /// When the last call was made, if it has not returned. Earlier ones may hang.
    in_flight: Option<Instant>,
    fetched: Option<Fetched>,
    /// Why the last call failed, and when.
    failed: Option<(NotConnected, Instant)>,
}

impl CallState {
    /// Returns what serves a connection that waits since `asked`.
    fn outcome(
        &self,
        asked: Instant,
        refused: Option<Instant>,
    ) -> Option<Result<Fetched, NotConnected>> {
        let serves = |fetched: &&Fetched| {
            (fetched.returned > asked || fetched.is_fresh())
                && refused.is_none_or(|refused| fetched.at > refused)
        };
        if let Some(fetched) = self.fetched.as_ref().filter(serves) {
            return Some(Ok(fetched.clone()));
        }
        let failed = self.failed.as_ref().filter(|(_, at)| *at > asked);
        failed.map(|(failure, _)| Err(failure.again()))
    }

    fn end(&mut self, made: Instant, outcome: Option<Result<Credentials, NotConnected>>) {
        let (is_last, returned) = (self.in_flight == Some(made), Instant::now());
        if is_last {
            self.in_flight = None;
        }
        match outcome {
            Some(Ok(credentials)) if self.fetched.as_ref().is_none_or(|last| made > last.at) => {
                self.fetched = Some(Fetched {
                    credentials,
                    at: made,
                    returned,
                });
            }
            // otherwise a later one may succeed
            Some(Err(failure)) if is_last => self.failed = Some((failure, returned)),
            _ => {}
        }
    }
}

/// Credentials of a provider.
#[derive(Clone)]
pub(crate) struct Fetched {
    credentials: Credentials,
    /// When the provider was called.
    pub(crate) at: Instant,
    returned: Instant,
}

impl Fetched {
    /// Returns how long after the call they are replaced. `None`: at the next connect.
    pub(crate) fn refresh_after(&self) -> Option<Duration> {
        let after = self.credentials.refresh_after;
        after.map(|after| after.max(SHORTEST))
    }

    /// Returns whether they serve a connection that did not wait for them.
    fn is_fresh(&self) -> bool {
        let is_due = |after| self.at.elapsed() >= after;
        self.returned.elapsed() < SHARED && !self.refresh_after().is_some_and(is_due)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use async_trait::async_trait;

    const HANGS: Duration = Duration::from_secs(60);

    /// Fails after a while.
    #[derive(Default)]
    struct Fails(Arc<AtomicU32>);

    #[async_trait]
    impl CredentialProvider for Fails {
        async fn fetch(&self, _: &Address) -> Result<Credentials, NotConnected> {
            self.0.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(300)).await;
            Err(NotConnected::new(StoreErrorKind::Other, "no token"))
        }
    }

    /// Connections to many servers must not wait for one failing call after the other.
    #[tokio::test]
    async fn a_call_fails_for_all_that_wait_for_it() {
        let calls = Arc::<AtomicU32>::default();
        let source = CredentialSource::from(Fails(Arc::clone(&calls)));
        let address = Address::Unix("server".into());
        for round in 1..=2 {
            let all = (0..8).map(|_| source.fetched(&address, HANGS, None));
            for outcome in join_all(all).await {
                let error = outcome.err().expect("it fails").error;
                assert_eq!(error.kind(), StoreErrorKind::Other);
                assert_eq!(error.said(), "no token");
            }
            assert_eq!(calls.load(Ordering::Relaxed), round);
        }
    }

    /// Returns the credentials, after as long as its first calls are told to take.
    struct Takes(Mutex<Vec<Duration>>, Option<Duration>);

    #[async_trait]
    impl CredentialProvider for Takes {
        async fn fetch(&self, _: &Address) -> Result<Credentials, NotConnected> {
            let takes = self.0.lock().unwrap().pop().unwrap_or_default();
            tokio::time::sleep(takes).await;
            let mut credentials = Credentials::new("app", "pw");
            credentials.refresh_after = self.1;
            Ok(credentials)
        }
    }

    /// The credentials are to be replaced before the call returns. They serve all that wait for it:
    /// otherwise each would make a call of its own, one after the other.
    #[tokio::test]
    async fn a_call_serves_all_that_wait_for_it() {
        let (long, refresh) = (Duration::from_millis(300), Some(SHORTEST));
        let source = CredentialSource::from(Takes(Mutex::new(vec![long]), refresh));
        let address = Address::Unix("server".into());
        let all = join_all((0..8).map(|_| source.fetched(&address, HANGS, None))).await;
        let calls: Vec<_> = all
            .into_iter()
            .map(|fetched| fetched.unwrap_or_else(|error| panic!("{error:?}")).at)
            .collect();
        assert!(calls.iter().all(|at| *at == calls[0]), "{calls:?}");
    }

    /// A second call is made next to one that hangs, and serves the connection that waits for that.
    #[tokio::test]
    async fn a_call_that_hangs_is_not_waited_for() {
        let source = CredentialSource::from(Takes(Mutex::new(vec![HANGS]), None));
        let address = Address::Unix("server".into());
        let hangs = Duration::from_millis(100);
        let (one, two) = tokio::join!(
            source.fetched(&address, hangs, None),
            source.fetched(&address, HANGS, None),
        );
        assert_eq!(one.unwrap().at, two.unwrap().at);
    }

    /// What a call returned serves for a while from its return on, however long it took.
    #[test]
    fn credentials_serve_from_their_return_on() {
        let now = Instant::now();
        let fetched = |ago: Duration| Fetched {
            credentials: Credentials::new("app", "pw"),
            at: now - 2 * SHARED,
            returned: now - ago,
        };
        assert!(fetched(SHARED / 2).is_fresh());
        assert!(!fetched(SHARED).is_fresh());
    }
}
