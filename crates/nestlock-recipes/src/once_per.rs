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

/// The lease of a running job, unless said otherwise.
const LEASE: Duration = Duration::from_secs(15);
/// How long [`OncePer::run_forever`] sleeps at most: the clock may have been set meanwhile.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);

/// A job that is run once for each tick, over all who use the same name. Nothing is sent yet.
///
/// # Errors
///
/// [`Error::InvalidName`], as [`LockClient::mutex`].
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

/// A job that is run once for each tick; made by [`once_per()`].
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
    /// When this replica came, for [`Missed::Skip`].
    since: u64,
    clock: Arc<dyn Fn() -> SystemTime + Send + Sync>,
}

/// What becomes of ticks that came while no replica was there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Missed {
    /// Those from before this replica came are not run by it.
    Skip,
    /// The last one is run, once, however many there were.
    #[default]
    Latest,
    /// The last so many are run, the oldest first. Zero counts as one. Of a cron pattern the last 10,000 at most, unless this
    /// is no less than the number of seconds that were missed.
    All(u32),
}

/// What one look came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome<T> {
    /// The job has run, and said this. With [`Missed::All`], more may be due: look again.
    Ran(T),
    /// The job was cancelled after [`OncePer::at_most`]. Its tick counts as done.
    Cancelled,
    /// Nothing is due: all ticks were run, here or elsewhere, or are not for us.
    AlreadyDone,
    /// Another replica is at it. Not said which: the lock's record has an owner, which tells no replica by itself; ask
    /// [`Lock::holder`](nestlock::Lock::holder) of the mutex, and `nestlock who`.
    Elsewhere,
}

impl OncePer {
    /// Marks a tick as done when its job has ended: it is run at least once, and never twice at the same time. The
    /// default.
    pub fn after(mut self) -> Self {
        self.marks_before = false;
        self
    }

    /// Marks a tick as done before its job begins: it is run at most once.
    pub fn before(mut self) -> Self {
        self.marks_before = true;
        self
    }

    /// What becomes of ticks that came while no replica was there. Default: [`Missed::Latest`].
    pub fn missed(mut self, missed: Missed) -> Self {
        self.missed = missed;
        self
    }

    /// Cancels a job that takes longer: its future is dropped, and the tick counts as done. Default: no limit.
    pub fn at_most(mut self, limit: Duration) -> Self {
        self.at_most = Some(limit);
        self
    }

    /// For how long a tick stays taken when the process that runs it dies; renewed every third of it while the job runs.
    /// Default 15 s; 10 ms to 10 years.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Reads the time from here, which may be a test's. Default: [`SystemTime::now`].
    pub fn clock(mut self, clock: impl Fn() -> SystemTime + Send + Sync + 'static) -> Self {
        self.clock = Arc::new(clock);
        self.since = self.now();
        self
    }

    /// Looks once: runs the job for one tick, if one is due and nobody is at it. Never waits for another replica.
    ///
    /// One command if nothing is due; else five, and the job.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`]: the lock was lost, and the job was dropped, or has not begun. [`Error::Store`],
    /// [`Error::Unconfirmed`] and the like: the server refused, or did not answer. With [`after`](Self::after) the job may
    /// have run, and will run again; with [`before`](Self::before) its tick may be marked, and will not run.
    ///
    /// # Cancel safety
    ///
    /// As cancel safe as the job: dropped midway, the job is dropped first, then the lock is released in the background. It is as
    /// if the process had died there, but nobody has to wait for the lease.
    pub async fn run<F: Future>(&self, job: impl FnOnce(Tick) -> F) -> Result<Outcome<F::Output>> {
        if self.due().await?.is_none() {
            return Ok(Outcome::AlreadyDone);
        }
        let renewed = AcquireOptions::new().watchdog_timeout(self.lease);
        let Some(guard) = self.lock.try_lock_with(renewed).await? else { return Ok(Outcome::Elsewhere) };
        // whoever had the lock before may have run it
        let Some(tick) = self.due().await? else {
            guard.unlock().await?;
            return Ok(Outcome::AlreadyDone);
        };
        if self.marks_before {
            self.mark(tick).await?;
        }
        // Marked before, and with the tick's number as the token, the mark was let in even if another replica has run this tick
        // since: it is the lock that says none has, and it is asked first. Whoever comes from here on finds the mark.
        let outcome = guard.run_until_lost(async { self.limited(job(tick)).await }).await?;
        if !self.marks_before {
            self.mark(tick).await?;
        }
        // the job has run and is marked: what happens to the lock is no news, and it is released in any case
        let _ = guard.unlock().await;
        Ok(outcome)
    }

    /// Runs the job for each tick, for ever: sleeps until the next one, and looks again every third of the lease while another
    /// replica is at it, or the server is away. Returns when the client was shut down: [`Error::Closed`]; and where it can never
    /// run: [`Error::InvalidName`] if the name with `:tick` behind it is too long or begins with `lock:`,
    /// [`Error::InvalidLease`].
    ///
    /// A job that panics ends this.
    ///
    /// # Cancel safety
    ///
    /// As [`run`](Self::run).
    pub async fn run_forever<F: Future>(&self, mut job: impl FnMut(Tick) -> F) -> Error {
        loop {
            let pause = match self.run(&mut job).await {
                Ok(Outcome::Ran(_) | Outcome::Cancelled) => continue,
                Ok(Outcome::AlreadyDone) => LONGEST_SLEEP,
                Ok(Outcome::Elsewhere) => self.lease / 3,
                Err(error) if crate::is_final(&error) => return error,
                Err(error) => {
                    tracing::warn!(job = self.lock.name(), %error, "a tick was not run, or not marked");
                    self.lease / 3
                }
            };
            let now = self.now();
            let next = self.ticks.next(now).map_or(u64::MAX, Tick::number);
            sleep(pause.min(LONGEST_SLEEP).min(Duration::from_millis(next.saturating_sub(now)))).await;
        }
    }

    /// The tick to run now, if the marker leaves one.
    async fn due(&self) -> Result<Option<Tick>> {
        let first = FencingToken::try_from(1).expect("1 is a token");
        let done = match self.client.fenced_get(&self.marker, first).await {
            Ok(_) => 0,
            // every mark is a higher token than this
            Err(Error::StaleToken { seen, .. }) => seen.get(),
            Err(error) => return Err(error),
        };
        let last = self.ticks.last(self.now()).filter(|tick| tick.number() > done);
        Ok(last.and_then(|last| match self.missed {
            Missed::Skip => (last.number() >= self.since).then_some(last),
            Missed::All(most) if done > 0 => self.ticks.oldest(last, done, most.max(1)).or(Some(last)),
            Missed::Latest | Missed::All(_) => Some(last),
        }))
    }

    async fn mark(&self, tick: Tick) -> Result<()> {
        match self.client.fenced_set(&self.marker, tick.number().to_string(), tick.token()).await {
            // a later tick was run: this one is done, too
            Err(Error::StaleToken { .. }) if !self.marks_before => Ok(()),
            marked => marked,
        }
    }

    async fn limited<F: Future>(&self, job: F) -> Outcome<F::Output> {
        match self.at_most {
            Some(limit) => timeout(limit, job).await.map_or(Outcome::Cancelled, Outcome::Ran),
            None => Outcome::Ran(job.await),
        }
    }

    /// Milliseconds since the epoch.
    fn now(&self) -> u64 {
        let since = (self.clock)().duration_since(UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    }
}

impl fmt::Debug for OncePer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OncePer").field("job", &self.lock.name()).field("ticks", &self.ticks).finish_non_exhaustive()
    }
}
