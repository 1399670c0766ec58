#![doc = include_str!("once_per.md")]

mod ticks;

use std::{
    fmt,
    future::Future,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use nestlock::{AcquireOptions, Error, FencingToken, Lock, LockClient, Result};
use tokio::time::{sleep, timeout};

#[cfg(feature = "cron")]
pub use self::ticks::InvalidPattern;
pub use self::ticks::{Tick, Ticks};
use crate::retry::is_final;

/// The default lease of a running job.
const LEASE: Duration = Duration::from_secs(15);
/// The longest sleep of [`OncePer::run_forever`]: the clock may be set during it.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);

/// Creates a job that runs once per tick, on one of all replicas that use the same name. Sends
/// nothing.
///
/// # Errors
///
/// [`Error::InvalidName`], as [`LockClient::mutex`].
///
/// For an example, see [`OncePer`].
///
/// [`Error::InvalidName`]: nestlock::Error
/// [`LockClient::mutex`]: nestlock::LockClient
pub fn once_per(client: &LockClient, name: impl AsRef<str>, ticks: Ticks) -> Result<OncePer> {
    let lock = client.mutex(name)?;
    let job = OncePer {
        client: client.clone(),
        marker: format!("{}:tick", lock.name()),
        lock,
        ticks,
        marks_before: false,
        missed: Missed::Latest,
        at_most: None,
        lease: LEASE,
        since: 0,
        clock: Arc::new(SystemTime::now),
    };
    Ok(job.clock(SystemTime::now))
}

/// A job that runs once per tick. Created by [`once_per()`].
///
/// ```
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = nestlock_embedded::EmbeddedServer::start()?;
/// # let client = nestlock::LockClient::connect(server.url()).await?;
/// use std::time::Duration;
///
/// use nestlock_recipes::once_per::{Outcome, Ticks, once_per};
///
/// let yearly = once_per(&client, "report", Ticks::every(Duration::from_secs(365 * 86_400)))?;
/// assert_eq!(yearly.run(|_| async { "written" }).await?, Outcome::Ran("written"));
/// // no replica runs this tick again
/// assert_eq!(yearly.run(|_| async { "written" }).await?, Outcome::AlreadyDone);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use]
pub struct OncePer {
    client: LockClient,
    lock: Lock,
    marker: String,
    ticks: Ticks,
    marks_before: bool,
    missed: Missed,
    at_most: Option<Duration>,
    lease: Duration,
    /// When this replica started, in milliseconds since the epoch, for [`Missed::Skip`].
    since: u64,
    clock: Arc<dyn Fn() -> SystemTime + Send + Sync>,
}

/// What happens to ticks that are due while no replica is running.
///
/// ```
/// # use nestlock_recipes::once_per::OncePer;
/// # fn example(hourly: OncePer) {
/// use nestlock_recipes::once_per::Missed;
///
/// let hourly = hourly.missed(Missed::All(24)); // after an outage, catches up on a day
/// # let _ = hourly;
/// # }
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Missed {
    /// This replica runs no ticks from before it started.
    Skip,
    /// The last tick runs, once, however many were missed.
    #[default]
    Latest,
    /// The last `n` ticks run, the oldest first. Zero counts as one. For a cron pattern, at most
    /// the last 10,000, unless `n` is at least the number of seconds that were missed.
    All(u32),
}

/// The outcome of one [`OncePer::run`].
///
/// For an example, see [`OncePer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome<T> {
    /// The job has run, and returned this. With [`Missed::All`], more ticks may be due: call again.
    Ran(T),
    /// The job was cancelled after [`OncePer::at_most`]. Its tick counts as done.
    Cancelled,
    /// No tick is due: all were run, here or elsewhere, or [`Missed`] leaves them out.
    AlreadyDone,
    /// Another replica is running the job. The owner in the lock's record does not identify that
    /// replica by itself: see `nestlock who`, and [`Lock::holder`](nestlock::Lock) of the
    /// mutex.
    Elsewhere,
}

impl OncePer {
    /// Marks a tick as done when its job has ended: it runs at least once, and never twice at the
    /// same time. The default.
    pub fn after(mut self) -> Self {
        self.marks_before = false;
        self
    }

    /// Marks a tick as done before its job begins: it runs at most once.
    pub fn before(mut self) -> Self {
        self.marks_before = true;
        self
    }

    /// Sets what happens to ticks that are due while no replica is running. Default:
    /// [`Missed::Latest`].
    pub fn missed(mut self, missed: Missed) -> Self {
        self.missed = missed;
        self
    }

    /// Cancels a job that takes longer: its future is dropped, and the tick counts as done.
    /// Default: no limit.
    pub fn at_most(mut self, limit: Duration) -> Self {
        self.at_most = Some(limit);
        self
    }

    /// Sets how long a tick stays taken if the process that runs it dies. The lock is renewed every
    /// third of this time while the job runs. Default 15 s; 10 ms to 10 years.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Reads the time from this function, such as the clock of a test. Default:
    /// [`SystemTime::now`].
    pub fn clock(mut self, clock: impl Fn() -> SystemTime + Send + Sync + 'static) -> Self {
        self.clock = Arc::new(clock);
        self.since = self.now();
        self
    }

    /// Checks once, and runs the job for one tick if one is due and no other replica is running it.
    /// Never waits for another replica.
    ///
    /// Sends one command if nothing is due, otherwise five, and runs the job.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`]: the lock was lost, and the job was dropped or has not begun.
    /// [`Error::Store`], [`Error::Unconfirmed`] and the like: the server rejected a request, or did
    /// not reply. With [`after`](Self::after) the job may have run, and will run again; with
    /// [`before`](Self::before) its tick may be marked, and will not run.
    ///
    /// # Cancel safety
    ///
    /// As cancel safe as the job. If dropped midway, the job is dropped first, then the lock is
    /// released in the background: the same as if the process had died there, but no other replica
    /// has to wait for the lease.
    ///
    /// [`Error::Lost`]: nestlock::Error
    /// [`Error::Store`]: nestlock::Error
    /// [`Error::Unconfirmed`]: nestlock::Error
    pub async fn run<F: Future>(&self, job: impl FnOnce(Tick) -> F) -> Result<Outcome<F::Output>> {
        if self.due().await?.is_none() {
            return Ok(Outcome::AlreadyDone);
        }
        let renewed = AcquireOptions::new().watchdog_timeout(self.lease);
        let Some(guard) = self.lock.try_lock_with(renewed).await? else {
            return Ok(Outcome::Elsewhere);
        };
        // the last holder of the lock may have run the tick since the first check
        let Some(tick) = self.due().await? else {
            guard.unlock().await?;
            return Ok(Outcome::AlreadyDone);
        };
        if self.marks_before {
            self.mark(tick).await?;
        }
        // A mark that was written before the job carries the tick's number as its token, so the
        // server accepts it even if another replica has run this tick since. Only the lock shows
        // that none has, so `run_until_lost` checks the lock first. Any later holder finds the
        // mark.
        let outcome = guard
            .run_until_lost(async { self.limited(job(tick)).await })
            .await?;
        if !self.marks_before {
            self.mark(tick).await?;
        }
        // the job has run and is marked, so an error of the release changes nothing: the client
        // keeps releasing
        let _ = guard.unlock().await;
        Ok(outcome)
    }

    /// Runs the job for each tick, forever. Sleeps until the next tick, and checks again every
    /// third of the lease while another replica runs the job or the server is unreachable. Returns
    /// only when the client is shut down ([`Error::Closed`]), or if the job can never run:
    /// [`Error::InvalidName`] if the name with `:tick` appended is too long or begins with `lock:`,
    /// and [`Error::InvalidLease`].
    ///
    /// A panic of the job ends this call.
    ///
    /// # Cancel safety
    ///
    /// As [`run`](Self::run).
    ///
    /// [`Error::Closed`]: nestlock::Error
    /// [`Error::InvalidLease`]: nestlock::Error
    /// [`Error::InvalidName`]: nestlock::Error
    pub async fn run_forever<F: Future>(&self, mut job: impl FnMut(Tick) -> F) -> Error {
        loop {
            let pause = match self.run(&mut job).await {
                Ok(Outcome::Ran(_) | Outcome::Cancelled) => continue,
                Ok(Outcome::AlreadyDone) => LONGEST_SLEEP,
                Ok(Outcome::Elsewhere) => self.lease / 3,
                Err(error) if is_final(&error) => return error,
                Err(error) => {
                    tracing::warn!(job = self.lock.name(), %error, "a tick was not run, or not marked");
                    self.lease / 3
                }
            };
            let now = self.now();
            let next = self.ticks.next(now).map_or(u64::MAX, Tick::number);
            sleep(
                pause
                    .min(LONGEST_SLEEP)
                    .min(Duration::from_millis(next.saturating_sub(now))),
            )
            .await;
        }
    }

    /// Returns the tick to run now. Returns `None` if the marker shows that none is due.
    async fn due(&self) -> Result<Option<Tick>> {
        let first = FencingToken::try_from(1).expect("1 is a token");
        let done = match self.client.fenced_get(&self.marker, first).await {
            Ok(_) => 0,
            // each mark is a higher token than 1, so this error reports the mark
            Err(Error::StaleToken { seen, .. }) => seen.get(),
            Err(error) => return Err(error),
        };
        let last = self
            .ticks
            .last(self.now())
            .filter(|tick| tick.number() > done);
        Ok(last.and_then(|last| match self.missed {
            Missed::Skip => (last.number() >= self.since).then_some(last),
            Missed::All(most) if done > 0 => {
                self.ticks.oldest(last, done, most.max(1)).or(Some(last))
            }
            Missed::Latest | Missed::All(_) => Some(last),
        }))
    }

    async fn mark(&self, tick: Tick) -> Result<()> {
        match self
            .client
            .fenced_set(&self.marker, tick.number().to_string(), tick.token())
            .await
        {
            // a later tick is marked: this one is done, too
            Err(Error::StaleToken { .. }) if !self.marks_before => Ok(()),
            marked => marked,
        }
    }

    async fn limited<F: Future>(&self, job: F) -> Outcome<F::Output> {
        match self.at_most {
            Some(limit) => timeout(limit, job)
                .await
                .map_or(Outcome::Cancelled, Outcome::Ran),
            None => Outcome::Ran(job.await),
        }
    }

    /// Returns the milliseconds since the epoch.
    fn now(&self) -> u64 {
        let since = (self.clock)()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    }
}

impl fmt::Debug for OncePer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OncePer")
            .field("job", &self.lock.name())
            .field("ticks", &self.ticks)
            .finish_non_exhaustive()
    }
}
