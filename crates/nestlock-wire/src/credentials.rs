//! What a connection logs in with.

use std::{fmt, time::Duration};

use async_trait::async_trait;

use crate::{address::Address, failure::NotConnected};

/// A user and a password.
///
/// ```
/// use nestlock_wire::Login;
///
/// let login = Login { user: Some("app".into()), password: Some("a secret".into()) };
/// assert_eq!(format!("{login:?}"), "Login(..)"); // it can be logged
/// ```
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

    /// Sets how long they are valid, from the call of the provider on: for a token that expires at a
    /// known time, what is left of it at the call. New ones are fetched after
    /// three quarters of that time, but not within 50 ms, and sent over the connection that is open
    /// (`AUTH`).
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

/// Provides credentials when a client connects. One call serves all connections that wait for it,
/// and those of the next 5 s, unless a server refuses what it returned or it is to be replaced. Its
/// error is that of all that wait.
///
/// ```
/// # use nestlock_wire::{Address, CredentialProvider, Credentials, NotConnected};
/// # use nestlock_wire::{CredentialSource, Server, ServerSettings};
/// struct Token(String);
///
/// #[async_trait::async_trait]
/// impl CredentialProvider for Token {
///     async fn fetch(&self, _: &Address) -> Result<Credentials, NotConnected> {
///         Ok(Credentials::new("app", &*self.0))
///     }
/// }
///
/// let mut settings = ServerSettings::new(Address::Tcp(Server::new("127.0.0.1", 6379)));
/// settings.credentials = Some(CredentialSource::from(Token("a token".into())));
/// ```
#[async_trait]
pub trait CredentialProvider: Send + Sync {
    /// Returns the credentials for a server. The caller sets the time limit. After a quarter of the
    /// connect timeout, a call may hang: another one is made next to it, and the first that returns
    /// serves all that wait. After the whole connect timeout, it is dropped.
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
