#![doc = include_str!("leader.md")]

use std::{future::Future, sync::Arc, time::Duration};

use nestlock::{AcquireOptions, Error, FencingToken, Lock, LockClient, LockGuard, Result};
use tokio::time::{Instant, sleep, sleep_until};

use crate::retry::is_final;

/// The default lease of a term.
const LEASE: Duration = Duration::from_secs(15);
/// How often an observer checks.
const LOOK: Duration = Duration::from_secs(1);
/// The first pause of [`Leader::lead`]; each further pause is twice as long, up to the lease.
const PAUSE: Duration = Duration::from_millis(200);

/// A candidate for an *office*, the leadership with a certain name: one of the replicas that elect
/// one of themselves. Cheap to clone; it sends nothing until it campaigns.
///
/// ```
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = nestlock_embedded::EmbeddedServer::start()?;
/// # let client = nestlock::LockClient::connect(server.url()).await?;
/// use nestlock_recipes::Leader;
///
/// let candidate = Leader::new(&client, "scheduler")?.identity("10.0.0.7:8080");
/// let term = candidate.campaign().await?; // waits for the end of another term
/// let leading = candidate.leader().await?.expect("this replica leads");
/// assert_eq!(leading.identity, "10.0.0.7:8080");
/// term.resign().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct Leader {
    client: LockClient,
    lock: Lock,
    record: String,
    identity: String,
    lease: Duration,
    step_down_before: Option<Duration>,
}

/// The leader.
///
/// For an example, see [`Leader`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Leading {
    /// The identity that the leader has set: see [`Leader::identity`].
    pub identity: String,
    /// The token of the term, higher than that of every earlier leader.
    pub token: FencingToken,
}

impl Leader {
    /// Creates a candidate for the office with this name.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`], as [`LockClient::mutex`].
    ///
    /// [`Error::InvalidName`]: nestlock::Error
    /// [`LockClient::mutex`]: nestlock::LockClient
    pub fn new(client: &LockClient, name: impl AsRef<str>) -> Result<Self> {
        // two candidates in one task must exclude each other
        let lock = client.fenced_lock(name)?.owner_per_acquire();
        let (client, record) = (client.clone(), format!("{}:leader", lock.name()));
        let identity = format!("process {}", std::process::id());
        Ok(Self {
            client,
            lock,
            record,
            identity,
            lease: LEASE,
            step_down_before: None,
        })
    }

    /// Sets the identity that other replicas see while this candidate leads, such as an address.
    /// Default: the process id.
    pub fn identity(mut self, identity: impl Into<String>) -> Self {
        self.identity = identity.into();
        self
    }

    /// Sets how long the office stays taken if the leader dies. The lease is renewed every third of
    /// this time. Default 15 s; 10 ms to 10 years.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Sets how long before the end of the lease [`Term::lost`] resolves if no renewal succeeds.
    /// Default: a third of the lease, which is also the maximum: a higher value counts as that.
    /// With zero, it resolves when the lease is over.
    pub fn step_down_before(mut self, before: Duration) -> Self {
        self.step_down_before = Some(before);
        self
    }

    /// Waits until this candidate leads.
    ///
    /// # Errors
    ///
    /// As [`Lock::lock`]; [`Error::StaleToken`] if another candidate was elected before this one
    /// could write its identity.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: if dropped midway, the candidate does not lead, and waits no longer. Its
    /// identity may have been written; [`Leader::leader`] ignores it once the lock is released in
    /// the background.
    ///
    /// [`Error::StaleToken`]: nestlock::Error
    /// [`Lock::lock`]: nestlock::Lock
    #[expect(clippy::missing_panics_doc, reason = "it does not panic")]
    pub async fn campaign(&self) -> Result<Term> {
        let guard = self
            .lock
            .lock_with(AcquireOptions::new().watchdog_timeout(self.lease))
            .await?;
        let token = guard
            .fencing_token()
            .expect("the guard of a fenced lock has a token");
        let record = format!("{} {}", guard.owner(), self.identity);
        self.client.fenced_set(&self.record, record, token).await?;
        if guard.is_lost() {
            return Err(guard.lost().await);
        }
        let third = self.lease / 3;
        Ok(Term {
            guard: Arc::new(guard),
            token,
            step_down_before: self
                .step_down_before
                .map_or(third, |before| before.min(third)),
        })
    }

    /// Campaigns, runs this work while it leads, resigns when the work has ended, and campaigns
    /// again, forever. The work is dropped when the term is lost. Between two terms, and after a
    /// failure, it pauses: 0.2 s at first, then longer, up to the lease.
    ///
    /// Returns only when the client is shut down ([`Error::Closed`]), or if no candidate can ever
    /// lead: [`Error::InvalidName`] if the name with `:leader` appended is too long or begins with
    /// `lock:`, and [`Error::InvalidLease`]. A panic of the work ends this call, too, and the term
    /// with it.
    ///
    /// # Cancel safety
    ///
    /// As cancel safe as the work. If dropped midway, the work is dropped first, then the term is
    /// given up in the background.
    ///
    /// [`Error::Closed`]: nestlock::Error
    /// [`Error::InvalidLease`]: nestlock::Error
    /// [`Error::InvalidName`]: nestlock::Error
    pub async fn lead<F: Future<Output = ()>>(&self, mut work: impl FnMut(Term) -> F) -> Error {
        let mut pause = PAUSE;
        loop {
            match self.campaign().await {
                Ok(term) => {
                    let elected = Instant::now();
                    let guard = Arc::clone(&term.guard);
                    if let Err(error) = guard.run_until_lost(async { work(term).await }).await {
                        tracing::warn!(office = self.lock.name(), %error, "the leader lost its term");
                    }
                    // otherwise a task that the work spawned has the term and still leads: the next
                    // campaign waits for it
                    if let Some(guard) = Arc::into_inner(guard) {
                        // the office is given up even if the server rejects the release or does not
                        // reply
                        let _ = guard.unlock().await;
                    }
                    if elected.elapsed() > self.lease {
                        pause = PAUSE;
                    }
                }
                Err(error) if is_final(&error) => return error,
                Err(error) => {
                    tracing::warn!(office = self.lock.name(), %error, "a campaign failed, and is retried");
                }
            }
            // candidates must not retry in step
            sleep(pause.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
            pause = (pause * 2).min(self.lease.max(PAUSE));
        }
    }

    /// Returns the leader, as the server saw it a moment ago. Returns `None` if there is no leader,
    /// or if it has not written its identity yet. Sends three commands.
    ///
    /// # Errors
    ///
    /// [`Error::Store`], [`Error::Unconfirmed`] and the like: the server rejected a request, or did
    /// not reply.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    ///
    /// [`Error::Store`]: nestlock::Error
    /// [`Error::Unconfirmed`]: nestlock::Error
    pub async fn leader(&self) -> Result<Option<Leading>> {
        let Some((token, record)) = self.record().await? else {
            return Ok(None);
        };
        let holder = self.lock.holder().await?;
        // each term has its own owner, so a record with another owner is from an earlier term
        let said = record
            .split_once(' ')
            .filter(|(owner, _)| holder.is_some_and(|holder| holder.as_str() == *owner));
        Ok(said.map(|(_, identity)| Leading {
            identity: identity.to_owned(),
            token,
        }))
    }

    /// Returns what the last leader that wrote its identity has written, with its token. The first
    /// read has a low token and fails with the highest one; the second read uses that. Neither
    /// changes the fence.
    async fn record(&self) -> Result<Option<(FencingToken, String)>> {
        let mut token = FencingToken::try_from(1).expect("1 is a token");
        loop {
            match self.client.fenced_get(&self.record, token).await {
                Ok(record) => {
                    return Ok(
                        record.map(|record| (token, String::from_utf8_lossy(&record).into_owned()))
                    );
                }
                Err(Error::StaleToken { seen, .. }) => token = seen,
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns an observer, which reports the leader and each change. It checks once a second, so
    /// it misses a term that begins and ends between two checks.
    #[must_use]
    pub fn observe(&self) -> Observer {
        Observer {
            leader: self.clone(),
            next_look: Instant::now(),
            has_told: false,
            told: None,
        }
    }
}

/// Reports the leader. Created by [`Leader::observe`].
///
/// ```
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = nestlock_embedded::EmbeddedServer::start()?;
/// # let client = nestlock::LockClient::connect(server.url()).await?;
/// use nestlock_recipes::Leader;
///
/// let mut observer = Leader::new(&client, "scheduler")?.observe();
/// assert_eq!(observer.next().await?, None); // no replica leads; the next call waits for a change
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Observer {
    leader: Leader,
    next_look: Instant,
    has_told: bool,
    told: Option<Leading>,
}

impl Observer {
    /// Returns the leader: the first time at once, then after each change. Returns `None` if there
    /// is no leader.
    ///
    /// # Errors
    ///
    /// As [`Leader::leader`]. The next call checks again, one second after this check.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: the next call reports a change that this one did not return.
    pub async fn next(&mut self) -> Result<Option<Leading>> {
        loop {
            sleep_until(self.next_look).await;
            let leading = self.leader.leader().await;
            self.next_look = Instant::now() + LOOK;
            let leading = leading?;
            if !self.has_told || self.told != leading {
                (self.has_told, self.told) = (true, leading.clone());
                return Ok(leading);
            }
        }
    }
}

/// Why a term ends.
///
/// ```no_run
/// # async fn example(term: nestlock_recipes::leader::Term) {
/// use nestlock_recipes::leader::Deposed;
///
/// match term.lost().await {
///     Deposed::Lost(error) => println!("another replica may lead now: {error}"),
///     _ => println!("finish within {:?}", term.remaining()),
/// }
/// # }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Deposed {
    /// No renewal succeeded, and the lease ends soon. The term still lasts.
    #[error("no renewal succeeded, and the lease ends soon; finish the work now")]
    NotRenewed,
    /// The term is over.
    #[error(transparent)]
    Lost(#[from] Error),
}

/// A term: this replica leads while it lasts. Dropping it gives up the office a moment later.
///
/// ```
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = nestlock_embedded::EmbeddedServer::start()?;
/// # let client = nestlock::LockClient::connect(server.url()).await?;
/// # let candidate = nestlock_recipes::Leader::new(&client, "scheduler")?;
/// let term = candidate.campaign().await?;
/// // dropped if the term is lost
/// let done = term.run(async { "the work of a leader" }).await?;
/// # assert!(!done.is_empty());
/// term.resign().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "if it is dropped at once, the office is given up at once"]
#[clippy::has_significant_drop]
pub struct Term {
    /// [`Leader::lead`] shares it, so that the office is not given up while the work runs.
    guard: Arc<LockGuard>,
    token: FencingToken,
    step_down_before: Duration,
}

impl Term {
    /// Returns the fencing token, which is higher than that of every earlier leader. Pass it to the
    /// resources that the leader writes to.
    #[must_use]
    pub fn token(&self) -> FencingToken {
        self.token
    }

    /// Returns how long this replica leads without a further renewal. Zero if it no longer leads.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.guard.remaining()
    }

    /// Resolves when the work must end: at the time of [`Leader::step_down_before`] before the end
    /// of the lease, or when the office is lost. For `select!`.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn lost(&self) -> Deposed {
        loop {
            let left = self.guard.remaining().saturating_sub(self.step_down_before);
            tokio::select! {
                biased;
                error = self.guard.lost() => return Deposed::Lost(error),
                // after this sleep, a renewal may have extended the lease: check again
                () = sleep(left), if !left.is_zero() => {}
                () = std::future::ready(()), if left.is_zero() => return Deposed::NotRenewed,
            }
        }
    }

    /// Runs this work while the term lasts, and drops it if the term is lost.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`]: the term was lost before the work ended.
    ///
    /// # Cancel safety
    ///
    /// As cancel safe as the work. The term continues.
    ///
    /// [`Error::Lost`]: nestlock::Error
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        self.guard.run_until_lost(work).await
    }

    /// Gives up the office, and waits for the confirmation of the server. Under [`Leader::lead`]
    /// this has no effect: the office is given up when the work has ended.
    ///
    /// # Errors
    ///
    /// As [`LockGuard::unlock`]: [`Error::Lost`] if it was lost before.
    ///
    /// # Cancel safety
    ///
    /// As [`LockGuard::unlock`]: the office is given up even if this future is dropped.
    ///
    /// [`Error::Lost`]: nestlock::Error
    /// [`LockGuard::unlock`]: nestlock::LockGuard
    pub async fn resign(self) -> Result<()> {
        match Arc::into_inner(self.guard) {
            Some(guard) => guard.unlock().await,
            None => Ok(()),
        }
    }
}
