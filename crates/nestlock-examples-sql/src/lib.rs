//! What the three programs in `examples/` have in common: two holders of one lock, of which the
//! first has slept past its lease.

use std::{
    env::{self, VarError},
    error::Error,
    time::Duration,
};

use nestlock::{AcquireOptions, FencingToken, LockClient, LockGuard};
use nestlock_embedded::EmbeddedServer;

/// The error of a program.
pub type Failure = Box<dyn Error + Send + Sync>;

/// A holder of the lock `account:7`, in a process of its own.
#[derive(Debug)]
pub struct Holder {
    client: LockClient,
    guard: LockGuard,
}

impl Holder {
    async fn acquire(url: &str, options: AcquireOptions) -> Result<Self, Failure> {
        // two clients stand for two processes
        let client = LockClient::connect(url).await?;
        let guard = client.fenced_lock("account:7")?.lock_with(options).await?;
        Ok(Self { client, guard })
    }

    /// Returns the fencing token, as a number for a column.
    ///
    /// # Panics
    ///
    /// Never: a fenced lock's guard has a token.
    pub fn token(&self) -> i64 {
        let token = self.guard.fencing_token();
        token.map(FencingToken::into).expect("the lock is fenced")
    }

    /// Releases the lock.
    ///
    /// # Errors
    ///
    /// If the lock was lost.
    pub async fn release(self) -> nestlock::Result<()> {
        let released = self.guard.unlock().await;
        self.client.shutdown().await?;
        released
    }
}

/// Two holders of one lock, one after the other.
#[derive(Debug)]
pub struct Holders {
    /// Its lease is over, and it does not know it.
    pub sleeper: Holder,
    /// It holds the lock now.
    pub next: Holder,
    _server: Option<EmbeddedServer>,
}

/// Acquires the lock twice, on the server in `NESTLOCK_URL`, or on an embedded one.
///
/// # Errors
///
/// If there is no server.
pub async fn holders() -> Result<Holders, Failure> {
    let (url, server) = match env::var("NESTLOCK_URL") {
        Ok(url) => (url, None),
        Err(VarError::NotPresent) => {
            let server = EmbeddedServer::start()?;
            (server.url(), Some(server))
        }
        Err(unreadable) => return Err(format!("NESTLOCK_URL: {unreadable}").into()),
    };
    let short = AcquireOptions::new().lease(Duration::from_millis(200));
    let sleeper = Holder::acquire(&url, short).await?;
    // waits until the lease is over
    let next = Holder::acquire(&url, AcquireOptions::new()).await?;
    Ok(Holders {
        sleeper,
        next,
        _server: server,
    })
}
