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

/// Most calls of a provider at the same time; for each server, if it is called for each. Others wait,
/// within the time of their connect.
const CALLS: usize = 16;

/// How long the credentials of one call serve other connections as well: a client makes several, and
/// a provider that takes a second must not take it for each.
const SHARED: Duration = Duration::from_secs(5);

/// How long a failure serves other connections as well: the many of a cluster must not keep a service
/// busy that fails.
const FAILED: Duration = Duration::from_millis(100);

/// After how many times the time after which it may hang a call is given up: no connect that waited
/// for it lasts longer.
const GIVEN_UP: u32 = 4;

/// The shortest time after which credentials are replaced: a lifetime of zero must not keep the
/// provider busy.
const SHORTEST: Duration = Duration::from_millis(50);

/// A credential provider, and one client's calls of it.
///
/// For an example, see [`CredentialProvider`].
#[derive(Clone)]
pub struct CredentialSource {
    pub(crate) provider: Arc<dyn CredentialProvider>,
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
            calls: Arc::default(),
        }
    }

    /// Returns the same provider for another client: calls of this one that never return do not
    /// count there. In a forked child, no call of the parent returns.
    #[must_use]
    pub fn for_another_client(&self) -> Self {
        Self::new(Arc::clone(&self.provider))
    }

    /// Says in the error of a connect that took too long whether the provider is the cause: whether a
    /// call has not returned for a quarter of the connect timeout. Otherwise returns an empty text.
    #[must_use]
    pub fn why_late(&self, connect_timeout: Duration) -> String {
        let calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let first = |calls: &Calls| Some(calls.state.borrow().in_flight.first()?.elapsed());
        let longest = calls.values().filter_map(first).max();
        longest
            .filter(|longest| *longest >= connect_timeout / 4)
            .map_or_else(String::new, |longest| {
                let longest = longest.as_secs_f32();
                format!(", and the credential provider has not returned for {longest:.1} s")
            })
    }

    /// Returns the calls for this server.
    fn calls(&self, address: &Address) -> Calls {
        let by_server = self.provider.is_by_server().then(|| address.clone());
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls.entry(by_server).or_default().clone()
    }

    /// Waits until no connection waits for a call, but not longer than `hangs`. Returns whether one
    /// did.
    pub(crate) async fn wait(&self, hangs: Duration) -> bool {
        let waited_for: Vec<Calls> = {
            let calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
            let waited_for = calls.values().filter(|calls| !calls.state.is_closed());
            waited_for.cloned().collect()
        };
        let each = waited_for.iter().map(|calls| calls.state.closed());
        _ = timeout(hangs, join_all(each)).await;
        !waited_for.is_empty()
    }

    /// Logs in to a server. If it refuses the credentials, tries once more with those of a later
    /// call: a token may have been replaced in the meantime. `hangs`: as for
    /// [`fetched`](Self::fetched).
    pub(crate) async fn log_in<T, F>(
        &self,
        address: &Address,
        hangs: Duration,
        log_in: impl Fn(Login) -> F,
    ) -> Result<(T, Fetched), NotConnected>
    where
        F: Future<Output = Result<T, NotConnected>>,
    {
        let first = self.fetched(address, hangs, None).await?;
        match log_in(first.credentials.login.clone()).await {
            Err(error) if error.is_login_refused() => {}
            outcome => return Ok((outcome?, first)),
        }
        let second = self.fetched(address, hangs, Some(first.at)).await?;
        let outcome = log_in(second.credentials.login.clone()).await;
        Ok((outcome.map_err(by_provider)?, second))
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
        let calls = self.calls(address);
        let mut news = calls.state.subscribe();
        let waiter = CredentialWaiter {
            asked: Instant::now(),
            hangs,
            refused,
        };
        loop {
            let step = news.borrow_and_update().step(waiter);
            match step {
                CallStep::Outcome(outcome) => return outcome,
                CallStep::Wait(time) => {
                    _ = timeout(time, news.changed()).await;
                    continue;
                }
                CallStep::Call => {}
            }
            // calls that block forever must not take ever more threads
            let permit = tokio::select! {
                biased;
                permit = Arc::clone(&calls.permits).acquire_owned() => permit,
                _ = news.changed() => continue,
            };
            // the semaphore is never closed
            let Ok(permit) = permit else { continue };
            let made = Instant::now();
            // another connection may have made one in the meantime
            let is_made = calls.state.send_if_modified(|calls| {
                let is_next = matches!(calls.step(waiter), CallStep::Call);
                if is_next {
                    calls.in_flight.push(made);
                }
                is_next
            });
            if is_made {
                self.call(&calls, address, made, GIVEN_UP * hangs, permit);
            }
        }
    }

    /// Calls the provider on a thread of its own, with a runtime of its own: code of the program
    /// must not block the thread that keeps the connections, and may outlive it.
    fn call(
        &self,
        calls: &Calls,
        address: &Address,
        made: Instant,
        limit: Duration,
        permit: OwnedSemaphorePermit,
    ) {
        let (provider, address, ends) =
            (Arc::clone(&self.provider), address.clone(), calls.clone());
        let call = move || {
            ends.end(made, fetch(&*provider, &address, limit, &ends));
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

/// Calls the provider. Returns `None` if no connection waits for it any more, or if it has taken
/// longer than `limit`.
fn fetch(
    provider: &dyn CredentialProvider,
    address: &Address,
    limit: Duration,
    calls: &Calls,
) -> Option<Result<Credentials, NotConnected>> {
    let began = Instant::now();
    let runtime = match Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return Some(failed(format!("cannot start a runtime: {error}"))),
    };
    let fetched = contained(|| {
        runtime.block_on(async {
            tokio::select! {
                biased;
                () = calls.state.closed() => None,
                fetched = timeout(limit, provider.fetch(address)) => fetched.ok(),
            }
        })
    });
    // A task that the program left behind must not delay the result. Dropped while it unwinds, the
    // runtime would wait for it.
    contained(|| runtime.shutdown_background());
    let outcome = fetched.unwrap_or_else(|| Some(failed("the credential provider panicked")));
    // one that blocks returns after it was given up: its failure must not end a later call's wait
    outcome.filter(|outcome| outcome.is_ok() || began.elapsed() < limit)
}

/// Says in a refusal where the login is from.
fn by_provider(failure: NotConnected) -> NotConnected {
    if !failure.is_login_refused() {
        return failure;
    }
    let why = format!(
        "{} to what the credential provider returned",
        failure.error.said()
    );
    NotConnected::new(failure.error.kind(), why)
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
#[derive(Clone)]
struct Calls {
    state: Arc<watch::Sender<CallState>>,
    /// Limits the calls that have not returned.
    permits: Arc<Semaphore>,
}

impl Default for Calls {
    fn default() -> Self {
        Self {
            state: Arc::default(),
            permits: Arc::new(Semaphore::new(CALLS)),
        }
    }
}

impl Calls {
    /// Ends a call. `None`: no connection waited for it, or it was given up.
    fn end(&self, made: Instant, outcome: Option<Result<Credentials, NotConnected>>) {
        self.state.send_modify(|calls| calls.end(made, outcome));
    }
}

#[derive(Default)]
struct CallState {
    /// When each call was made that has not returned, in that order.
    in_flight: Vec<Instant>,
    fetched: Option<Fetched>,
    failed: Option<FailedCall>,
}

/// The last call that failed.
struct FailedCall {
    why: NotConnected,
    made: Instant,
    ended: Instant,
}

/// A connection that needs credentials: see [`CredentialSource::fetched`].
#[derive(Clone, Copy)]
struct CredentialWaiter {
    asked: Instant,
    hangs: Duration,
    refused: Option<Instant>,
}

/// What a connection does next.
enum CallStep {
    Outcome(Result<Fetched, NotConnected>),
    /// Waits for a call to end, but not longer than this.
    Wait(Duration),
    Call,
}

impl CallState {
    fn step(&self, waiter: CredentialWaiter) -> CallStep {
        let serves = |fetched: &&Fetched| {
            (fetched.returned > waiter.asked || fetched.is_fresh())
                && waiter.refused.is_none_or(|refused| fetched.at > refused)
        };
        if let Some(fetched) = self.fetched.as_ref().filter(serves) {
            return CallStep::Outcome(Ok(fetched.clone()));
        }
        let left = |made: Instant| waiter.hangs.saturating_sub(made.elapsed());
        let failed = self.failed.as_ref();
        if let Some(failed) = failed.filter(|failed| failed.ended + FAILED > waiter.asked) {
            // a service that refuses two calls at a time may still return from the earlier one
            let is_over = |made: &Instant| made.elapsed() >= GIVEN_UP * waiter.hangs;
            let is_first = self
                .in_flight
                .iter()
                .all(|made| *made > failed.made || is_over(made));
            return if is_first || left(failed.made).is_zero() {
                CallStep::Outcome(Err(failed.why.again()))
            } else {
                CallStep::Wait(left(failed.made))
            };
        }
        let last = self.in_flight.last().map(|made| left(*made));
        last.filter(|left| !left.is_zero())
            .map_or(CallStep::Call, CallStep::Wait)
    }

    fn end(&mut self, made: Instant, outcome: Option<Result<Credentials, NotConnected>>) {
        self.in_flight.retain(|call| *call != made);
        // an earlier call may return after a later one, with a token that was replaced since
        let is_last = self.fetched.as_ref().is_none_or(|last| made > last.at);
        let ended = Instant::now();
        match outcome.filter(|_| is_last) {
            Some(Ok(credentials)) => {
                self.fetched = Some(Fetched {
                    credentials,
                    at: made,
                    returned: ended,
                });
            }
            Some(Err(why)) => self.failed = Some(FailedCall { why, made, ended }),
            None => {}
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
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

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
            tokio::time::sleep(2 * FAILED).await;
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
        for fetched in all {
            let fetched = fetched.unwrap_or_else(|error| panic!("{error:?}"));
            // that of the first call, which is the only one that takes so long
            assert!(fetched.returned.saturating_duration_since(fetched.at) >= long);
        }
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

    /// Fails its calls after this time, except for the first ones, which take times of their own.
    struct FailsAfter(Duration, Mutex<Vec<Duration>>, Arc<AtomicU32>);

    #[async_trait]
    impl CredentialProvider for FailsAfter {
        async fn fetch(&self, _: &Address) -> Result<Credentials, NotConnected> {
            self.2.fetch_add(1, Ordering::Relaxed);
            let first = self.1.lock().unwrap().pop();
            tokio::time::sleep(first.unwrap_or(self.0)).await;
            match first {
                Some(_) => Ok(Credentials::new("app", "pw")),
                None => Err(NotConnected::new(StoreErrorKind::Other, "no token")),
            }
        }
    }

    /// Each call fails after it has led to another one: the failure is told all the same.
    #[tokio::test]
    async fn a_slow_failure_is_told() {
        let (slow, calls) = (Duration::from_millis(500), Arc::<AtomicU32>::default());
        let fails = FailsAfter(slow, Mutex::default(), Arc::clone(&calls));
        let source = CredentialSource::from(fails);
        let address = Address::Unix("server".into());
        let fetched = source.fetched(&address, slow * 2 / 3, None).await;
        assert_eq!(fetched.err().expect("it fails").error.said(), "no token");
        assert!(calls.load(Ordering::Relaxed) <= 3, "{calls:?}");
    }

    /// A service that handles one call at a time refuses the second one, which is made next to the
    /// first because that is slow. The first one returns all the same.
    #[tokio::test]
    async fn a_refused_second_call_ends_no_slow_first_one() {
        let (slow, calls) = (Duration::from_millis(900), Arc::<AtomicU32>::default());
        let fails = FailsAfter(Duration::ZERO, Mutex::new(vec![slow]), Arc::clone(&calls));
        let source = CredentialSource::from(fails);
        let address = Address::Unix("server".into());
        let fetched = source.fetched(&address, slow * 2 / 3, None).await;
        assert!(fetched.is_ok(), "{:?}", fetched.err());
        assert_eq!(calls.load(Ordering::Relaxed), 2);
    }

    /// Connections give up and come again in turn, so that one always waits. Calls that hung are
    /// given up all the same, and their threads are free for others.
    #[tokio::test]
    async fn calls_that_hung_are_given_up_while_others_wait() {
        let hung = vec![HANGS; 100];
        let source = CredentialSource::from(Takes(Mutex::new(hung), None));
        let address = Address::Unix("server".into());
        let hangs = Duration::from_millis(5);
        let waits = async |first: u32| {
            tokio::time::sleep(first * hangs).await;
            loop {
                let fetched = source.fetched(&address, hangs, None);
                if let Ok(Ok(_)) = timeout(2 * GIVEN_UP * hangs, fetched).await {
                    return;
                }
            }
        };
        let all = join_all((0..5).map(waits));
        let limit = Duration::from_secs(30);
        assert!(timeout(limit, all).await.is_ok(), "not within {limit:?}");
    }

    /// A call hangs, and another one has served all.
    #[tokio::test]
    async fn a_call_for_which_no_connection_waits_is_not_waited_for() {
        let source = CredentialSource::from(Takes(Mutex::new(vec![HANGS]), None));
        let address = Address::Unix("server".into());
        let fetched = source
            .fetched(&address, Duration::from_millis(50), None)
            .await;
        assert!(fetched.is_ok());
        assert!(!source.wait(HANGS).await);
    }

    /// A call that blocks its thread returns long after it was given up, and fails.
    #[tokio::test]
    async fn a_late_failure_of_a_call_given_up_is_forgotten() {
        struct Late(AtomicU32);
        #[async_trait]
        impl CredentialProvider for Late {
            async fn fetch(&self, _: &Address) -> Result<Credentials, NotConnected> {
                if self.0.fetch_add(1, Ordering::Relaxed) == 0 {
                    thread::sleep(Duration::from_secs(1));
                    return Err(NotConnected::new(StoreErrorKind::Other, "late"));
                }
                // in flight when the first one returns
                tokio::time::sleep(Duration::from_millis(1_500)).await;
                Ok(Credentials::new("app", "pw"))
            }
        }
        let source = CredentialSource::from(Late(AtomicU32::new(0)));
        let address = Address::Unix("server".into());
        let fetched = |hangs| source.fetched(&address, hangs, None);
        let (short, long) = (Duration::from_millis(100), HANGS);
        let first = timeout(5 * short, fetched(short));
        let others = async {
            tokio::time::sleep(2 * short).await;
            fetched(long).await
        };
        let (_, second) = tokio::join!(first, others);
        assert!(second.is_ok(), "{:?}", second.err());
    }

    /// An earlier call ends after a later one. What it says is older.
    #[test]
    fn a_call_counts_for_nothing_after_a_later_one() {
        let (now, mut calls) = (Instant::now(), CallState::default());
        let made = |ago: u64| now - Duration::from_secs(ago);
        calls.end(made(1), Some(Ok(Credentials::new("app", "new"))));
        calls.end(made(2), Some(Ok(Credentials::new("app", "old"))));
        calls.end(made(3), Some(failed("no token")));
        assert_eq!(calls.fetched.map(|fetched| fetched.at), Some(made(1)));
        assert!(calls.failed.is_none());
    }

    /// A call for each server is made, and those for one block forever: the others have calls left.
    #[tokio::test]
    async fn blocked_calls_for_a_server_leave_others_theirs() {
        struct Blocks(Arc<AtomicU32>, Arc<AtomicBool>);
        #[async_trait]
        impl CredentialProvider for Blocks {
            async fn fetch(&self, address: &Address) -> Result<Credentials, NotConnected> {
                if *address == Address::Unix("blocks".into()) {
                    self.0.fetch_add(1, Ordering::Relaxed);
                    while !self.1.load(Ordering::Relaxed) {
                        thread::sleep(Duration::from_millis(5));
                    }
                }
                Ok(Credentials::new("app", "pw"))
            }
        }
        let (calls, is_over) = (Arc::<AtomicU32>::default(), Arc::<AtomicBool>::default());
        let source = CredentialSource::from(Blocks(Arc::clone(&calls), Arc::clone(&is_over)));
        let (hangs, limit) = (Duration::from_millis(1), Duration::from_secs(30));
        let [blocks, works] = ["blocks", "works"].map(|name| Address::Unix(name.into()));
        let all_block = async {
            while calls.load(Ordering::Relaxed) < CALLS as u32 {
                tokio::time::sleep(hangs).await;
            }
        };
        let all_block = timeout(limit, all_block);
        tokio::select! {
            _ = source.fetched(&blocks, hangs, None) => panic!("none returns"),
            all = all_block => assert!(all.is_ok(), "{calls:?} calls"),
        }
        let works = timeout(limit, source.fetched(&works, limit, None)).await;
        is_over.store(true, Ordering::Relaxed);
        assert!(works.is_ok_and(|fetched| fetched.is_ok()));
    }
}
