#![doc = include_str!("leader.md")]

use std::{future::Future, sync::Arc, time::Duration};

use nestlock::{AcquireOptions, Error, FencingToken, Lock, LockClient, LockGuard, Result};
use tokio::time::{Instant, sleep, sleep_until};

/// The lease of a term, unless said otherwise.
const LEASE: Duration = Duration::from_secs(15);
/// How often an observer looks.
const LOOK: Duration = Duration::from_secs(1);
/// How long [`Leader::lead`] pauses at first; then twice as long each time, up to the lease.
const PAUSE: Duration = Duration::from_millis(200);

/// A candidate: one replica of those that elect one of them. Cheap to clone; nothing is sent until it campaigns.
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

/// Who leads.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Leading {
    /// What the leader calls itself.
    pub identity: String,
    /// Higher than that of every leader before.
    pub token: FencingToken,
}

impl Leader {
    /// A candidate for the office of this name.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`], as [`LockClient::mutex`].
    pub fn new(client: &LockClient, name: impl AsRef<str>) -> Result<Self> {
        // two candidates in one task are two
        let lock = client.fenced_lock(name)?.owner_per_acquire();
        let (client, record) = (client.clone(), format!("{}:leader", lock.name()));
        let identity = format!("process {}", std::process::id());
        Ok(Self { client, lock, record, identity, lease: LEASE, step_down_before: None })
    }

    /// What others are told while this candidate leads: an address, for example. Default: the process's number.
    pub fn identity(mut self, identity: impl Into<String>) -> Self {
        self.identity = identity.into();
        self
    }

    /// How long the office stays taken when the leader dies; renewed every third of it. Default 15 s; 10 ms to 10 years.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// How long before the lease ends the work is told, when no renewal gets through. Default: a third of the lease, which is
    /// also the most: what is more counts as that. Zero tells it when it is over.
    pub fn step_down_before(mut self, before: Duration) -> Self {
        self.step_down_before = Some(before);
        self
    }

    /// Waits until this candidate leads.
    ///
    /// # Errors
    ///
    /// As [`Lock::lock`]; [`Error::StaleToken`] if somebody else was elected before this one could say who it is.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropped midway, the candidate does not lead, and waits no longer. Its identity may have been written; nobody
    /// takes it for the leader's.
    #[expect(clippy::missing_panics_doc, reason = "it does not")]
    pub async fn campaign(&self) -> Result<Term> {
        let guard = self.lock.lock_with(AcquireOptions::new().watchdog_timeout(self.lease)).await?;
        let token = guard.fencing_token().expect("a fenced lock's guard has one");
        let record = format!("{} {}", guard.owner(), self.identity);
        self.client.fenced_set(&self.record, record, token).await?;
        if guard.is_lost() {
            return Err(guard.lost().await);
        }
        let third = self.lease / 3;
        Ok(Term {
            guard: Arc::new(guard),
            token,
            step_down_before: self.step_down_before.map_or(third, |before| before.min(third)),
        })
    }

    /// Campaigns, does this work while it leads, resigns when the work has ended, and campaigns again, for ever. The work is
    /// dropped when the term is lost. Between two terms, and after a failure, it pauses: 0.2 s at first, then longer, the lease
    /// at most.
    ///
    /// Returns when the client was shut down: [`Error::Closed`]; and where nobody can ever lead: [`Error::InvalidName`] if the
    /// name with `:leader` behind it is too long or begins with `lock:`, [`Error::InvalidLease`]. Work that panics ends this,
    /// too; the term ends with it.
    ///
    /// # Cancel safety
    ///
    /// As cancel safe as the work: dropped midway, the work is dropped first, then the term is given up in the background.
    pub async fn lead<F: Future<Output = ()>>(&self, mut work: impl FnMut(Term) -> F) -> Error {
        let mut pause = PAUSE;
        loop {
            match self.campaign().await {
                Ok(term) => {
                    let elected = Instant::now();
                    let guard = Arc::clone(&term.guard);
                    if let Err(error) = guard.run_until_lost(async { work(term).await }).await {
                        tracing::warn!(office = self.lock.name(), %error, "a leader was deposed");
                    }
                    // else a task of the work's has the term, and leads on: the next campaign waits for it
                    if let Some(guard) = Arc::into_inner(guard) {
                        // it is given up, whatever the server says
                        let _ = guard.unlock().await;
                    }
                    if elected.elapsed() > self.lease {
                        pause = PAUSE;
                    }
                }
                Err(error) if crate::is_final(&error) => return error,
                Err(error) => tracing::warn!(office = self.lock.name(), %error, "a campaign failed"),
            }
            // not in step with the others
            sleep(pause.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
            pause = (pause * 2).min(self.lease.max(PAUSE));
        }
    }

    /// Who leads, as the server saw it a moment ago. `None`: nobody, or somebody who has not said yet who it is. Three commands.
    ///
    /// # Errors
    ///
    /// [`Error::Store`], [`Error::Unconfirmed`] and the like: the server refused, or did not answer.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn leader(&self) -> Result<Option<Leading>> {
        let Some((token, record)) = self.record().await? else { return Ok(None) };
        let holder = self.lock.holder().await?;
        // each term has an owner of its own
        let said = record.split_once(' ').filter(|(owner, _)| holder.is_some_and(|holder| holder.as_str() == *owner));
        Ok(said.map(|(_, identity)| Leading { identity: identity.to_owned(), token }))
    }

    /// What the last leader to say so has written. A low token is told the highest one, and that reads: neither changes it.
    async fn record(&self) -> Result<Option<(FencingToken, String)>> {
        let mut token = FencingToken::try_from(1).expect("1 is a token");
        loop {
            match self.client.fenced_get(&self.record, token).await {
                Ok(record) => {
                    return Ok(record.map(|record| (token, String::from_utf8_lossy(&record).into_owned())));
                }
                Err(Error::StaleToken { seen, .. }) => token = seen,
                Err(error) => return Err(error),
            }
        }
    }

    /// Tells who leads, and each change. It looks once a second: what begins and ends between two looks is not told.
    #[must_use]
    pub fn observe(&self) -> Observer {
        Observer { leader: self.clone(), next_look: Instant::now(), has_told: false, told: None }
    }
}

/// Tells who leads; made by [`Leader::observe`].
#[derive(Debug)]
pub struct Observer {
    leader: Leader,
    next_look: Instant,
    has_told: bool,
    told: Option<Leading>,
}

impl Observer {
    /// Who leads: at first at once, then when it is somebody else, or nobody.
    ///
    /// # Errors
    ///
    /// As [`Leader::leader`]. The next call looks again, a second after this one did.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: what was not returned is told by the next call.
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

/// Why a term comes to its end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Deposed {
    /// No renewal got through, and the lease ends soon. The term still lasts.
    #[error("no renewal got through, and the lease ends soon; come to an end")]
    NotRenewed,
    /// The term is over.
    #[error(transparent)]
    Lost(#[from] Error),
}

/// The time in which this replica leads. Dropped, it is given up a moment later.
#[derive(Debug)]
#[must_use = "dropped at once, the office is given up at once"]
#[clippy::has_significant_drop]
pub struct Term {
    /// Under [`Leader::lead`] also with that, so that nothing gives it up while the work goes on.
    guard: Arc<LockGuard>,
    token: FencingToken,
    step_down_before: Duration,
}

impl Term {
    /// Higher than that of every leader before; for what the leader writes to.
    #[must_use]
    pub fn token(&self) -> FencingToken {
        self.token
    }

    /// How long this replica leads without a renewal. Zero: it does not any more.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.guard.remaining()
    }

    /// Resolves when the work must come to an end: [`Leader::step_down_before`] the lease ends, or when the office is
    /// lost. For `select!`.
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
                // a renewal may have come meanwhile
                () = sleep(left), if !left.is_zero() => {}
                () = std::future::ready(()), if left.is_zero() => return Deposed::NotRenewed,
            }
        }
    }

    /// Runs this work while the term lasts; when it is lost, the work is dropped.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`]: the term was lost before the work ended.
    ///
    /// # Cancel safety
    ///
    /// As cancel safe as the work. The term goes on.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        self.guard.run_until_lost(work).await
    }

    /// Gives the office up, and waits until the server has been told. Under [`Leader::lead`] it is given up when the work has
    /// ended, and not here.
    ///
    /// # Errors
    ///
    /// As [`LockGuard::unlock`]: [`Error::Lost`] if it was lost before.
    ///
    /// # Cancel safety
    ///
    /// As [`LockGuard::unlock`]: the office is given up also if this is dropped.
    pub async fn resign(self) -> Result<()> {
        match Arc::into_inner(self.guard) {
            Some(guard) => guard.unlock().await,
            None => Ok(()),
        }
    }
}
