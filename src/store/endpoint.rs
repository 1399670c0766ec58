//! Where the servers are and how to log in: from a URL, or from fred's configuration.

use std::io;

#[cfg(feature = "rustls")]
use crate::store::tls::Tls;
use nestlock_wire::{Address, CredentialSource, Login, Server, ServerSettings, Wire};

use crate::{
    error::{Error, Result, StoreError, StoreErrorKind},
    options::Config,
    store::url::{Leads, Url, refuse},
};

/// Where the servers are and how to log in, from a URL or from fred's configuration.
///
/// ```no_run
/// # #[cfg(feature = "fred")]
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use nestlock::{LockClient, fred::types::config::Config};
///
/// let config = Config::from_url("redis://127.0.0.1:6379")?; // converts into an endpoint
/// let client = LockClient::builder().connect_to(config).await?;
/// # drop(client); Ok(())
/// # }
/// ```
#[derive(Clone)]
#[cfg_attr(
    not(any(feature = "fred", feature = "redis-rs")),
    expect(unreachable_pub, reason = "public with the feature")
)]
pub struct Endpoint {
    /// Credentials, database and TLS; its address is the first one.
    pub(super) server: ServerSettings,
    pub(super) place: Deployment,
    /// The wire that the URL requests.
    wire: Option<Wire>,
    /// Whether the URL requests TLS.
    #[cfg(feature = "rustls")]
    is_secret: bool,
}

/// How the servers are deployed, and their addresses.
#[derive(Debug, Clone)]
pub(super) enum Deployment {
    /// A single server.
    Server,
    /// A cluster: some of its nodes.
    Cluster(Vec<Server>),
    /// Sentinels, which name the service's master.
    Sentinel(Sentinels),
    /// A service with failover: the addresses of its servers, of which one is the master.
    List(Vec<Server>),
}

/// The sentinels of a service.
#[derive(Clone)]
pub(super) struct Sentinels {
    pub(super) at: Vec<Server>,
    pub(super) service: String,
    /// The sentinels' login. `None`: that of the servers, or none.
    pub(super) login: Option<Login>,
}

impl std::fmt::Debug for Sentinels {
    /// Omits user and password.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sentinels")
            .field("at", &self.at)
            .field("service", &self.service)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Endpoint {
    /// Omits user and password.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Endpoint({})", self.address())
    }
}

impl Endpoint {
    pub(super) fn new(server: ServerSettings, place: Deployment, wire: Option<Wire>) -> Self {
        Self {
            server,
            place,
            wire,
            #[cfg(feature = "rustls")]
            is_secret: false,
        }
    }

    /// Reads a URL; see [`Url::read`].
    pub(crate) fn from_url(url: &str) -> Result<Self> {
        let url = Url::read(url)?;
        let first = |at: &[Server]| match at.first() {
            Some(server) => Ok(Address::Tcp(server.clone())),
            None => refuse("the URL names no host"),
        };
        let (address, place) = match url.leads {
            Leads::Socket(path) => (Address::Unix(path), Deployment::Server),
            Leads::Servers(at) => (
                first(&at)?,
                if at.len() == 1 {
                    Deployment::Server
                } else {
                    Deployment::List(at)
                },
            ),
            Leads::Cluster(at) => (first(&at)?, Deployment::Cluster(at)),
            Leads::Sentinels { at, service, login } => (
                first(&at)?,
                Deployment::Sentinel(Sentinels { at, service, login }),
            ),
        };
        let server = ServerSettings {
            login: url.login.unwrap_or_default(),
            database: url.database,
            ..ServerSettings::new(address)
        };
        let endpoint = Self::new(server, place, url.wire);
        #[cfg(feature = "rustls")]
        let endpoint = Self {
            is_secret: url.is_secret,
            ..endpoint
        };
        Ok(endpoint)
    }

    /// Sets whether it requests TLS, as `rediss://` does.
    #[cfg(all(feature = "redis-rs", feature = "rustls"))]
    pub(super) fn by_tls(self, is_secret: bool) -> Self {
        Self { is_secret, ..self }
    }

    /// Prepares the credentials for one client, and sets where they come from, if `source` is given.
    /// Fails if there is a login already.
    pub(crate) fn with_credentials(mut self, source: Option<&CredentialSource>) -> Result<Self> {
        // builder and endpoint may make more clients, also in a forked child
        let Some(source) = source else {
            let own = self.server.credentials.take();
            self.server.credentials = own.map(|own| own.for_another_client());
            return Ok(self);
        };
        if self.server.credentials.is_some() || self.server.login != Login::default() {
            return refuse(
                "`credentials` is set, and the URL or fred's configuration has a login, too; leave one of them out",
            );
        }
        self.server.credentials = Some(source.for_another_client());
        Ok(self)
    }

    /// Adds the TLS configuration if the URL requests TLS: the given one, or else the system's CAs.
    /// Fails if `tls` is given and the URL does not request TLS.
    #[cfg(feature = "rustls")]
    pub(crate) fn secured(mut self, tls: Option<&Tls>) -> Result<Self> {
        if !self.is_secret {
            return match tls {
                None => Ok(self),
                Some(_) if self.server.is_by_tls() => refuse(
                    "`tls` is set, but fred's configuration has TLS of its own; leave out `tls`",
                ),
                Some(_) => refuse(
                    "`tls` is set, but the URL does not request TLS; use rediss://, rediss-cluster:// or rediss-sentinel://",
                ),
            };
        }
        let system = Tls::new();
        let tls = tls.unwrap_or(&system);
        self.server.tls = Some(tls.settings()?);
        Ok(self)
    }

    /// Returns whether this is a configured node of a cluster.
    pub(super) fn has_seed(&self, server: &Server) -> bool {
        matches!(&self.place, Deployment::Cluster(seeds) if seeds.contains(server))
    }

    /// Returns the wire to use: the URL's, or else the configured one.
    pub(crate) fn wire(&self, config: &Config) -> Wire {
        self.wire.unwrap_or(config.tuning.wire)
    }

    /// Returns the addresses for display, never the password.
    pub(super) fn address(&self) -> String {
        let list = |at: &[Server]| {
            at.iter()
                .map(Server::to_string)
                .collect::<Vec<_>>()
                .join(",")
        };
        match &self.place {
            Deployment::Server => self.server.address.to_string(),
            Deployment::Cluster(at) | Deployment::List(at) => list(at),
            Deployment::Sentinel(sentinels) => {
                format!("{}/{}", list(&sentinels.at), sentinels.service)
            }
        }
    }

    /// Returns the error for a system that has no thread or file descriptor left for a client.
    pub(crate) fn without_a_thread(&self, error: &io::Error) -> Error {
        let why = format!("cannot start a thread: {error}");
        Error::Connect {
            address: self.address(),
            source: StoreError::new(StoreErrorKind::Unavailable, false, why),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(url: &str) -> Endpoint {
        Endpoint::from_url(url).unwrap_or_else(|error| panic!("{url}: {error}"))
    }

    #[test]
    fn each_form_is_read() {
        for (url, address) in [
            ("redis://a", "a:6379"),
            ("valkey://u:p@a:1/3", "a:1"),
            ("redis://a,b:2", "a:6379,b:2"),
            ("redis-cluster://u:p@a:1,b,[::1]:3", "a:1,b:6379,[::1]:3"),
            ("valkey-cluster://[::1]", "[::1]:6379"),
            ("redis-cluster://a:1?node=b:2&node=c:3", "a:1,b:2,c:3"),
            ("redis-sentinel://:p%40@a,b:2/my/5", "a:26379,b:2/my"),
            ("redis-sentinel://a?sentinelServiceName=my", "a:26379/my"),
        ] {
            assert_eq!(at(url).address(), address, "{url}");
        }
        let sentinel = at(
            "redis-sentinel://u:p%40@a,b/my/5?sentinelUsername=s&sentinelPassword=%2Fq&wire=own",
        );
        assert_eq!(
            (
                sentinel.server.login.user.as_deref(),
                sentinel.server.login.password.as_deref()
            ),
            (Some("u"), Some("p@"))
        );
        assert_eq!(
            (sentinel.server.database, sentinel.wire),
            (Some(5), Some(Wire::Own))
        );
        #[cfg(feature = "fred")]
        assert_eq!(at("redis://a?wire=fred").wire, Some(Wire::Fred));
        let Deployment::Sentinel(sentinels) = &sentinel.place else {
            panic!("{sentinel:?}")
        };
        assert_eq!(
            sentinels.login,
            Some(Login {
                user: Some("s".into()),
                password: Some("/q".into())
            })
        );
        assert!(!format!("{sentinels:?}").contains('q'));
    }

    #[test]
    fn what_is_no_such_url_is_refused() {
        for url in [
            "redis-cluster://a/x",
            "redis-sentinel://a",
            "redis-sentinel://a,b/",
            "redis://a,,b",
            "redis://a,b:x",
            "redis://",
            "redis-cluster://",
            "redis-cluster://a?nodes=b",
            "redis-clusters://a",
        ] {
            assert!(
                matches!(Endpoint::from_url(url), Err(Error::InvalidConfig { .. })),
                "{url}"
            );
        }
    }
}
