//! What a connection logs in with: a login that is fixed, or one from a provider.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use tokio::sync::Semaphore;

use crate::{address::Address, clock::Instant, failure::NotConnected};

/// A user and a password.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Login {
    /// The user. `None`: `default`.
    pub user: Option<String>,
    /// The password. `None`: no login.
    pub password: Option<String>,
}

impl fmt::Debug for Login {
    /// Omits user and password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Login(..)")
    }
}

/// A user and a password that may expire.
///
/// ```
/// use std::time::Duration;
///
/// # use nestlock_wire::Credentials;
/// let token = Credentials::new("app", "a token").valid_for(Duration::from_secs(900));
/// ```
#[derive(Clone)]
pub struct Credentials {
    pub(crate) login: Login,
    /// How long after the request for them they are replaced. `None`: at the next connect.
    pub(crate) refresh_after: Option<Duration>,
}

impl fmt::Debug for Credentials {
    /// Omits user and password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials")
            .field("refresh_after", &self.refresh_after)
            .finish_non_exhaustive()
    }
}

impl Credentials {
    /// Creates credentials that are not replaced while a connection lasts. For a password without a
    /// user, use the user `default`.
    pub fn new(user: impl Into<String>, password: impl Into<String>) -> Self {
        Self {
            login: Login {
                user: Some(user.into()),
                password: Some(password.into()),
            },
            refresh_after: None,
        }
    }

    /// Sets how long they are valid, from the call of the provider on. New ones are fetched after
    /// three quarters of that time, and sent over the connection that is open (`AUTH`).
    #[must_use]
    pub fn valid_for(mut self, time: Duration) -> Self {
        self.refresh_after = Some(time.mul_f64(0.75));
        self
    }
}

impl From<Login> for Credentials {
    /// Returns credentials that are not replaced while a connection lasts.
    fn from(login: Login) -> Self {
        Self {
            login,
            refresh_after: None,
        }
    }
}

/// Provides credentials when a client connects. One call serves all connections of the next 5 s,
/// unless a server refuses what it returned.
#[async_trait]
pub trait CredentialProvider: Send + Sync {
    /// Returns the credentials for a server. The caller sets the time limit.
    ///
    /// Each call runs on a thread of its own, with a tokio runtime of its own, so it may block. A
    /// panic counts as an error.
    ///
    /// # Cancel safety
    ///
    /// An implementation must be cancel safe: the connect that calls it may run out of time.
    async fn fetch(&self, address: &Address) -> Result<Credentials, NotConnected>;

    /// Returns whether the credentials for one server are for that one only. If not, one call
    /// serves all servers.
    fn is_by_server(&self) -> bool {
        true
    }
}

/// Credentials that a provider returned.
#[derive(Clone)]
pub(crate) struct Fetched {
    pub(crate) credentials: Credentials,
    /// When it was called.
    pub(crate) at: Instant,
}

/// The last credentials for a server, or for all of them. Locked while the provider is called.
pub(crate) type LastFetched = Arc<tokio::sync::Mutex<Option<Fetched>>>;

/// A credential provider, and one client's calls of it.
#[derive(Clone)]
pub struct CredentialSource {
    pub(crate) provider: Arc<dyn CredentialProvider>,
    /// Limits the calls that have not returned.
    pub(crate) calls: Arc<Semaphore>,
    last: Arc<Mutex<HashMap<Option<Address>, LastFetched>>>,
}

/// Most calls of a provider at the same time. Others wait, within the time of their connect.
const CALLS: usize = 16;

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
    pub(crate) fn last(&self, address: &Address) -> LastFetched {
        let by_server = self.provider.is_by_server().then(|| address.clone());
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(last.entry(by_server).or_default())
    }
}

impl fmt::Debug for CredentialSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CredentialSource(..)")
    }
}
