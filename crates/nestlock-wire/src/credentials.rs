//! What a connection logs in with: a login that is fixed, or one from a provider.

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use tokio::sync::Semaphore;

use crate::{address::Address, failure::NotConnected};

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
    /// Creates credentials that are valid until the next connect. For a password without a user,
    /// use the user `default`.
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
    /// Returns credentials that are valid until the next connect.
    fn from(login: Login) -> Self {
        Self {
            login,
            refresh_after: None,
        }
    }
}

/// Provides the credentials for each connect.
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
}

/// A credential provider, and how many of one client's calls have not returned.
#[derive(Clone)]
pub struct CredentialSource {
    pub(crate) provider: Arc<dyn CredentialProvider>,
    pub(crate) calls: Arc<Semaphore>,
}

/// Most calls of a provider at the same time. Others wait, within the time of their connect.
const CALLS: usize = 16;

impl<P: CredentialProvider + 'static> From<P> for CredentialSource {
    fn from(provider: P) -> Self {
        Self {
            provider: Arc::new(provider),
            calls: Arc::new(Semaphore::new(CALLS)),
        }
    }
}

impl CredentialSource {
    /// Returns the same provider for another client: calls of this one that never return do not
    /// count there. In a forked child, no call of the parent returns.
    #[must_use]
    pub fn for_another_client(&self) -> Self {
        Self {
            provider: Arc::clone(&self.provider),
            calls: Arc::new(Semaphore::new(CALLS)),
        }
    }
}

impl fmt::Debug for CredentialSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CredentialSource(..)")
    }
}
