//! A client's calls of a credential provider, and which connections a call serves.

use std::{
    collections::HashMap,
    fmt, mem,
    panic::{self, AssertUnwindSafe},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use tokio::{
    runtime::Builder,
    sync::{Semaphore, oneshot},
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
    calls: Arc<Semaphore>,
    last: Arc<Mutex<HashMap<Option<Address>, Last>>>,
}

impl<P: CredentialProvider + 'static> From<P> for CredentialSource {
    fn from(provider: P) -> Self {
        Self::new(Arc::new(provider))
    }
}

impl CredentialSource {
    fn new(provider: Arc<dyn CredentialProvider>) -> Self {
        Self {
            provider,
            calls: Arc::new(Semaphore::new(CALLS)),
            last: Arc::default(),
        }
    }

    /// Returns the same provider for another client: calls of this one that never return do not
    /// count there. In a forked child, no call of the parent returns.
    #[must_use]
    pub fn for_another_client(&self) -> Self {
        Self::new(Arc::clone(&self.provider))
    }

    /// Returns the place of the credentials for this server.
    fn last(&self, address: &Address) -> Last {
        let by_server = self.provider.is_by_server().then(|| address.clone());
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(last.entry(by_server).or_default())
    }

    /// Logs in to a server. If it refuses the credentials, tries once more, with those of a later
    /// call: a token may have been replaced in the meantime.
    pub(crate) async fn log_in<T, F>(
        &self,
        address: &Address,
        log_in: impl Fn(Login) -> F,
    ) -> Result<(T, Fetched), NotConnected>
    where
        F: Future<Output = Result<T, NotConnected>>,
    {
        let first = self.fetched(address, None).await?;
        match log_in(first.credentials.login.clone()).await {
            Err(error) if error.is_login_refused() => {
                let second = self.fetched(address, Some(first.at)).await?;
                Ok((log_in(second.credentials.login.clone()).await?, second))
            }
            outcome => Ok((outcome?, first)),
        }
    }

    /// Calls the provider, or takes what a call for another connection has returned: credentials
    /// just before, or an error in the meantime. If a server has `refused` the credentials of a
    /// call, only a later one serves.
    async fn fetched(
        &self,
        address: &Address,
        refused: Option<Instant>,
    ) -> Result<Fetched, NotConnected> {
        let asked = Instant::now();
        let last = self.last(address);
        // one call at a time: the others take its result
        let mut last = last.lock().await;
        match &*last {
            Some(LastCall::Fetched(fetched))
                if fetched.are_shared() && refused.is_none_or(|refused| fetched.at > refused) =>
            {
                return Ok(fetched.clone());
            }
            Some(LastCall::Failed(failure, at)) if *at > asked => return Err(failure.again()),
            _ => {}
        }
        let at = Instant::now();
        match fetch(self, address).await {
            Ok(credentials) => {
                let fetched = Fetched { credentials, at };
                *last = Some(LastCall::Fetched(fetched.clone()));
                Ok(fetched)
            }
            Err(failure) => {
                *last = Some(LastCall::Failed(failure.again(), Instant::now()));
                Err(failure)
            }
        }
    }
}

impl fmt::Debug for CredentialSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CredentialSource(..)")
    }
}

/// How the last call of the provider ended.
enum LastCall {
    Fetched(Fetched),
    /// Why it failed, and when.
    Failed(NotConnected, Instant),
}

/// The last call for a server, or for all of them. Locked while the provider is called.
type Last = Arc<tokio::sync::Mutex<Option<LastCall>>>;

/// Credentials of a provider.
#[derive(Clone)]
pub(crate) struct Fetched {
    credentials: Credentials,
    /// When the provider was called.
    pub(crate) at: Instant,
}

impl Fetched {
    /// Returns how long after the call they are replaced. `None`: at the next connect.
    pub(crate) fn refresh_after(&self) -> Option<Duration> {
        let after = self.credentials.refresh_after;
        after.map(|after| after.max(SHORTEST))
    }

    fn are_shared(&self) -> bool {
        self.at.elapsed()
            < self
                .refresh_after()
                .map_or(SHARED, |after| after.min(SHARED))
    }
}

/// Calls the provider on a thread of its own, with a runtime of its own: code of the program must
/// not block the thread that keeps the connections, and may outlive it.
async fn fetch(source: &CredentialSource, address: &Address) -> Result<Credentials, NotConnected> {
    let failed = |why: String| NotConnected::new(StoreErrorKind::Unavailable, why);
    // Calls that block forever must not take ever more threads. The semaphore is never closed.
    let permit = Arc::clone(&source.calls).acquire_owned().await;
    let (mut tell, told) = oneshot::channel();
    let (provider, address) = (Arc::clone(&source.provider), address.clone());
    let call = move || {
        let _permit = permit;
        let runtime = match Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => {
                _ = tell.send(Err(failed(format!("cannot start a runtime: {error}"))));
                return;
            }
        };
        let fetched = panic::catch_unwind(AssertUnwindSafe(|| {
            runtime.block_on(async {
                tokio::select! {
                    biased;
                    // the caller's time is over
                    () = tell.closed() => None,
                    fetched = provider.fetch(&address) => Some(fetched),
                }
            })
        }));
        // A task that the program left behind must not delay the permit. Dropped while it unwinds,
        // the runtime would wait for it.
        runtime.shutdown_background();
        match fetched {
            Ok(Some(fetched)) => _ = tell.send(fetched),
            Ok(None) => {}
            Err(panic) => {
                _ = tell.send(Err(failed("the credential provider panicked".into())));
                // its drop may panic, too, and would then end the process
                if let Err(again) = panic::catch_unwind(AssertUnwindSafe(|| drop(panic))) {
                    mem::forget(again);
                }
            }
        }
    };
    thread::Builder::new()
        .name("credentials".into())
        .spawn(call)
        .map_err(|error| failed(format!("cannot start a thread: {error}")))?;
    told.await
        .unwrap_or_else(|_| Err(failed("the call for credentials has ended".into())))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use async_trait::async_trait;
    use futures_util::future::join_all;

    use super::*;

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
            let all = (0..8).map(|_| source.fetched(&address, None));
            for outcome in join_all(all).await {
                let error = outcome.err().expect("it fails").error;
                assert_eq!(error.kind(), StoreErrorKind::Other);
                assert_eq!(error.said(), "no token");
            }
            assert_eq!(calls.load(Ordering::Relaxed), round);
        }
    }
}
