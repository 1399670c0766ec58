//! Where servers are, and how to log in: from a URL, or from a configuration of fred's.

#[cfg(feature = "rustls")]
use fred::bytes_utils::Str;
use fred::types::config::{Config as FredConfig, Server, ServerConfig};
#[cfg(feature = "fred-config")]
use fred::{
    clients::Client,
    types::config::{ConnectionConfig, PerformanceConfig},
};

#[cfg(feature = "rustls")]
use super::Tls;
use super::{
    url::{Leads, Url, refuse},
    wire,
};
use crate::{
    error::Result,
    options::{Config, Login, Wire},
};
#[cfg(feature = "fred-config")]
use crate::{
    error::StoreError,
    topology::{NodeRole, TopologyNode},
};

/// Where the servers are, and how to log in: made from a URL, or from a configuration of fred's.
#[derive(Clone)]
#[cfg_attr(not(feature = "fred-config"), expect(unreachable_pub, reason = "public with the feature"))]
pub struct Endpoint {
    /// Credentials, database and TLS; it leads to the first address.
    pub(super) server: FredConfig,
    pub(super) place: Place,
    /// What each server's certificate must have.
    #[cfg(feature = "rustls")]
    pub(super) server_name: Option<Str>,
    /// As the URL says.
    wire: Option<Wire>,
    /// Whether the URL asks for TLS.
    #[cfg(feature = "rustls")]
    is_secret: bool,
}

/// What the addresses are.
#[derive(Debug, Clone)]
pub(super) enum Place {
    /// One server's.
    Server,
    /// Nodes of a cluster.
    Cluster(Vec<Server>),
    /// Sentinels, which know where the service is.
    Sentinel(Sentinels),
    /// One service's: the server among them that is the master.
    List(Vec<Server>),
}

/// Who knows where a master is.
#[derive(Clone)]
pub(super) struct Sentinels {
    pub(super) at: Vec<Server>,
    pub(super) service: String,
    /// Theirs; `None`: the servers', or none.
    pub(super) login: Option<Login>,
}

impl std::fmt::Debug for Sentinels {
    /// Without user and password.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sentinels").field("at", &self.at).field("service", &self.service).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Endpoint {
    /// Without user and password.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Endpoint({})", self.address())
    }
}

#[cfg(feature = "fred-config")]
impl From<FredConfig> for Endpoint {
    fn from(server: FredConfig) -> Self {
        let place = match &server.server {
            ServerConfig::Centralized { .. } | ServerConfig::Unix { .. } => Place::Server,
            ServerConfig::Clustered { hosts, .. } => Place::Cluster(hosts.clone()),
            ServerConfig::Sentinel { hosts, service_name, username, password } => {
                let login = (username.is_some() || password.is_some())
                    .then(|| Login { user: username.clone(), password: password.clone() });
                Place::Sentinel(Sentinels { at: hosts.clone(), service: service_name.clone(), login })
            }
        };
        Self::new(server, place, None)
    }
}

impl Endpoint {
    fn new(server: FredConfig, place: Place, wire: Option<Wire>) -> Self {
        Self {
            server,
            place,
            #[cfg(feature = "rustls")]
            server_name: None,
            wire,
            #[cfg(feature = "rustls")]
            is_secret: false,
        }
    }

    /// What a URL says: see [`Url::read`].
    pub(crate) fn from_url(url: &str) -> Result<Self> {
        let url = Url::read(url)?;
        let centralized = |at: &[Server]| match at.first() {
            Some(server) => Ok(ServerConfig::Centralized { server: server.clone() }),
            None => refuse("the URL names no host"),
        };
        let (server, place) = match url.leads {
            Leads::Socket(path) => (ServerConfig::Unix { path }, Place::Server),
            Leads::Servers(at) => (centralized(&at)?, if at.len() == 1 { Place::Server } else { Place::List(at) }),
            Leads::Cluster(at) => (centralized(&at)?, Place::Cluster(at)),
            Leads::Sentinels { at, service, login } => {
                (centralized(&at)?, Place::Sentinel(Sentinels { at, service, login }))
            }
        };
        let Login { user, password } = url.login.unwrap_or_default();
        let server = FredConfig { server, username: user, password, database: url.database, ..FredConfig::default() };
        let endpoint = Self::new(server, place, url.wire);
        #[cfg(feature = "rustls")]
        let endpoint = Self { is_secret: url.is_secret, ..endpoint };
        Ok(endpoint)
    }

    /// With the certificates for it, if the URL asks for TLS; with none given, the system's.
    #[cfg(feature = "rustls")]
    pub(crate) fn secured(mut self, tls: Option<&Tls>) -> Result<Self> {
        if !self.is_secret {
            return match tls {
                None => Ok(self),
                Some(_) if self.server.tls.is_some() => {
                    refuse("`tls` was given, and the configuration of fred's has TLS of its own; leave out `tls`")
                }
                Some(_) => refuse(
                    "`tls` was given, and the URL asks for none; use rediss://, rediss-cluster:// or rediss-sentinel://",
                ),
            };
        }
        let system = Tls::new();
        let tls = tls.unwrap_or(&system);
        self.server.tls = Some(tls.config()?);
        self.server_name = tls.name().map(Str::from);
        if let ServerConfig::Centralized { server } = &mut self.server.server {
            server.tls_server_name.clone_from(&self.server_name);
        }
        Ok(self)
    }

    /// What leads to this one of its servers and sentinels, or to the first address, over a connection of somebody's own.
    #[cfg(feature = "fred-config")]
    pub(crate) fn leads_to(&self, node: Option<&TopologyNode>, sentinel_login: Option<&Login>) -> Result<FredConfig> {
        let mut config = self.server.clone();
        let Some(node) = node.filter(|_| !matches!(self.place, Place::Server)) else { return Ok(config) };
        let address = node.address.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
        let Some((host, port)) = address else { return refuse(format!("{} is no address of a server", node.address)) };
        let server = Server::new(host, port);
        #[cfg(feature = "rustls")]
        let server = Server { tls_server_name: self.server_name.clone(), ..server };
        config.server = ServerConfig::Centralized { server };
        if node.role == NodeRole::Sentinel {
            config.database = None;
            let own = if let Place::Sentinel(sentinels) = &self.place { sentinels.login.as_ref() } else { None };
            if let Some(login) = own.or(sentinel_login) {
                (config.username, config.password) = (login.user.clone(), login.password.clone());
                config.credential_provider = None;
            }
        }
        Ok(config)
    }

    /// A client of fred's, connected to where such a configuration leads as nestlock itself connects: each address of a name is
    /// tried, and an error quotes no password. The caller limits it. Unstable.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropped midway, the connection is closed.
    #[cfg(feature = "fred-config")]
    #[doc(hidden)]
    pub async fn client(
        config: &FredConfig,
        performance: PerformanceConfig,
        connection: ConnectionConfig,
    ) -> Result<Client, StoreError> {
        wire::fred_client(config, performance, connection).await
    }

    /// Which client carries requests and messages.
    pub(crate) fn wire(&self, config: &Config) -> Wire {
        self.wire.unwrap_or(config.wire)
    }

    /// Where it leads, for people: never the password.
    pub(super) fn address(&self) -> String {
        let list = |at: &[Server]| at.iter().map(|at| format!("{}:{}", at.host, at.port)).collect::<Vec<_>>().join(",");
        match &self.place {
            Place::Server => wire::address(&self.server),
            Place::Cluster(at) | Place::List(at) => list(at),
            Place::Sentinel(sentinels) => format!("{}/{}", list(&sentinels.at), sentinels.service),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

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
        let sentinel = at("redis-sentinel://u:p%40@a,b/my/5?sentinelUsername=s&sentinelPassword=%2Fq&wire=fred");
        assert_eq!((sentinel.server.username.as_deref(), sentinel.server.password.as_deref()), (Some("u"), Some("p@")));
        assert_eq!((sentinel.server.database, sentinel.wire), (Some(5), Some(Wire::Fred)));
        let Place::Sentinel(sentinels) = &sentinel.place else { panic!("{sentinel:?}") };
        assert_eq!(sentinels.login, Some(Login { user: Some("s".into()), password: Some("/q".into()) }));
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
            assert!(matches!(Endpoint::from_url(url), Err(Error::InvalidConfig { .. })), "{url}");
        }
    }
}
