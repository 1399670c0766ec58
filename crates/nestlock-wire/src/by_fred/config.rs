//! Converts fred's configuration to settings, and vice versa.

use std::{fmt, sync::Arc};

use async_trait::async_trait;
use fred::error::{Error as FredError, ErrorKind as FredKind};
use fred::types::config::{
    Config as FredConfig, CredentialProvider as FredProvider, Server as FredServer, ServerConfig,
};
#[cfg(feature = "rustls")]
use fred::types::config::{TlsConnector, TlsHostMapping};

#[cfg(feature = "rustls")]
use crate::settings::TlsSettings;
use crate::{
    address::{Address, Server},
    credentials::{CredentialProvider, Credentials, Login},
    error::StoreErrorKind,
    failure::NotConnected,
    settings::{AnnouncedNames, ServerSettings},
};

impl From<&FredServer> for Server {
    fn from(server: &FredServer) -> Self {
        Self::new(&*server.host, server.port)
    }
}

/// Returns this server as the configuration has it, with the name that its certificate must have.
/// If the configuration does not have it, returns it without such a name.
fn as_configured(servers: &[FredServer], at: &Server) -> FredServer {
    servers
        .iter()
        .find(|server| *server.host == *at.host && server.port == at.port)
        .cloned()
        .unwrap_or_else(|| FredServer::new(&*at.host, at.port))
}

/// Credentials from one of fred's credential providers.
struct FromProvider {
    provider: Arc<dyn FredProvider>,
    servers: Vec<FredServer>,
}

#[async_trait]
impl CredentialProvider for FromProvider {
    async fn fetch(&self, address: &Address) -> Result<Credentials, NotConnected> {
        let server = match address {
            Address::Tcp(at) => as_configured(&self.servers, at),
            // the form in which fred itself passes it
            Address::Unix(path) => FredServer::new(path.display().to_string(), 0),
        };
        let fetched = self.provider.fetch(Some(&server)).await;
        let (user, password) = fetched.map_err(|error| NotConnected::from_fred(&error, false))?;
        if user.is_some() && password.is_none() {
            // the login would be that of `default`, without a word
            let why = "the credential provider returned a user without a password";
            return Err(NotConnected::new(StoreErrorKind::Other, why));
        }
        Ok(Credentials {
            login: Login { user, password },
            refresh_after: self.provider.refresh_interval(),
        })
    }
}

/// A credential provider of fred's, from one that is not, for connections of the program's own.
struct ToProvider {
    provider: Arc<dyn CredentialProvider>,
    address: Address,
}

impl fmt::Debug for ToProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ToProvider(..)")
    }
}

#[async_trait]
impl FredProvider for ToProvider {
    async fn fetch(
        &self,
        _: Option<&FredServer>,
    ) -> Result<(Option<String>, Option<String>), FredError> {
        match self.provider.fetch(&self.address).await {
            Ok(Credentials { login, .. }) => Ok((login.user, login.password)),
            Err(refused) => Err(FredError::new(FredKind::Auth, refused.error.said())),
        }
    }
}

impl From<FredConfig> for ServerSettings {
    /// Takes the first address.
    fn from(config: FredConfig) -> Self {
        let hosts = config.server.hosts();
        let address = match (&config.server, hosts.first()) {
            #[cfg(unix)]
            (ServerConfig::Unix { path }, _) => Address::Unix(path.clone()),
            (_, Some(first)) => Address::Tcp(Server::from(first)),
            (_, None) => Address::Tcp(Server::new("", 0)),
        };
        #[cfg(feature = "rustls")]
        let tls = config.tls.as_ref().and_then(|tls| {
            #[allow(
                irrefutable_let_patterns,
                reason = "another crate may enable another library's TLS in fred"
            )]
            let TlsConnector::Rustls(connector) = &tls.connector else {
                return None;
            };
            Some(TlsSettings {
                connector: connector.clone(),
                server_name: None,
            })
        });
        let credentials = config.credential_provider.clone();
        Self {
            address,
            login: Login {
                user: config.username.clone(),
                password: config.password.clone(),
            },
            credentials: credentials.map(|provider| {
                let servers = config.server.hosts();
                FromProvider { provider, servers }.into()
            }),
            database: config.database,
            #[cfg(feature = "rustls")]
            tls,
            announced: AnnouncedNames::default(),
            fred: Some(Arc::new(config)),
        }
    }
}

#[cfg(feature = "rustls")]
impl ServerSettings {
    /// Returns the name that fred's configuration gives for the certificate of this server.
    pub(crate) fn name_of_freds(&self, at: &Server) -> Option<Arc<str>> {
        let servers = self.fred.as_ref()?.server.hosts();
        as_configured(&servers, at)
            .tls_server_name
            .map(|name| (&*name).into())
    }

    /// Returns the name that fred's configuration maps this IP address of a cluster's node to.
    ///
    /// fred maps the addresses in the reply to `CLUSTER SLOTS`; its default host is the one that
    /// was queried. Here the default is the first configured host, whichever was queried: none of
    /// the hosts is more right than another. A seed's address is mapped, too: it is its node's.
    pub(crate) fn name_mapped_by_freds(&self, at: &Server) -> Option<Arc<str>> {
        let fred = self.fred.as_ref()?;
        let ServerConfig::Clustered { hosts, .. } = &fred.server else {
            return None;
        };
        let (ip, default) = (at.bare_host().parse().ok()?, &*hosts.first()?.host);
        match &fred.tls.as_ref()?.hostnames {
            TlsHostMapping::None => None,
            TlsHostMapping::DefaultHost => Some(default.into()),
            TlsHostMapping::Custom(names) => names.map(&ip, default).map(Arc::from),
        }
    }
}

impl From<&ServerSettings> for FredConfig {
    fn from(settings: &ServerSettings) -> Self {
        let mut config = settings.fred.as_deref().cloned().unwrap_or_default();
        config.server = match &settings.address {
            #[cfg(unix)]
            Address::Unix(path) => ServerConfig::Unix { path: path.clone() },
            // `by_fred::connect` has refused it
            #[cfg(not(unix))]
            Address::Unix(_) => config.server,
            Address::Tcp(at) => {
                let server = FredServer {
                    host: at.bare_host().into(),
                    ..as_configured(&config.server.hosts(), at)
                };
                #[cfg(feature = "rustls")]
                let server = FredServer {
                    tls_server_name: settings.tls_name(at).map(|name| (&*name).into()),
                    ..server
                };
                ServerConfig::Centralized { server }
            }
        };
        let Login { user, password } = settings.login.clone();
        (config.username, config.password) = (user, password);
        config.credential_provider = match (&settings.credentials, config.credential_provider) {
            (None, _) => None,
            (Some(_), Some(provider)) => Some(provider),
            (Some(source), None) => Some(Arc::new(ToProvider {
                provider: Arc::clone(&source.provider),
                address: settings.address.clone(),
            })),
        };
        config.database = settings.database;
        #[cfg(feature = "rustls")]
        if let Some(tls) = &settings.tls {
            let connector = TlsConnector::Rustls(tls.connector.clone());
            match &mut config.tls {
                Some(known) => known.connector = connector,
                none => *none = Some(connector.into()),
            }
        }
        config
    }
}

#[cfg(test)]
mod tests {
    #[cfg(feature = "rustls")]
    use std::net::IpAddr;

    #[cfg(feature = "rustls")]
    use fred::types::config::{HostMapping, TlsConfig};

    use super::*;

    #[test]
    fn where_freds_urls_lead() {
        for (url, host, port) in [
            ("redis://[::1]:7000", "::1", 7000),
            ("redis://[2001:db8::7]", "2001:db8::7", 6379),
            ("redis://127.0.0.1:7000/3", "127.0.0.1", 7000),
            ("redis://user:pass@locks.example", "locks.example", 6379),
        ] {
            match ServerSettings::from(FredConfig::from_url(url).unwrap()).address {
                Address::Tcp(to) => assert_eq!((to.bare_host(), to.port), (host, port), "{url}"),
                other @ Address::Unix(_) => panic!("{url}: {other}"),
            }
        }
    }

    /// As if the feature `rustls` were off and another crate enabled fred's TLS: a password must
    /// not be sent in plain text.
    #[cfg(feature = "rustls")]
    #[tokio::test]
    async fn tls_that_only_fred_speaks_is_not_left_out() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut config =
            FredConfig::from_url(&format!("redis://{}", listener.local_addr().unwrap())).unwrap();
        config.tls = Some(TlsConnector::default_rustls().unwrap().into());
        let settings = ServerSettings {
            tls: None,
            ..ServerSettings::from(config)
        };
        assert!(settings.is_by_tls());
        let error = crate::stream::open(&settings).await.unwrap_err();
        assert!(error.to_string().contains("wire=fred"), "{error}");
    }

    /// A name that fred's configuration gives for one server says nothing about the others, which a
    /// cluster or sentinels name later.
    #[cfg(feature = "rustls")]
    #[test]
    fn a_certificates_name_counts_for_its_own_server() {
        let named = |port, name: &str| FredServer {
            tls_server_name: Some(name.into()),
            ..FredServer::new("localhost", port)
        };
        let mut config = FredConfig {
            server: ServerConfig::new_clustered(vec![("localhost", 1)]),
            tls: Some(TlsConnector::default_rustls().unwrap().into()),
            ..FredConfig::default()
        };
        if let ServerConfig::Clustered { hosts, .. } = &mut config.server {
            *hosts = vec![named(1, "one"), named(2, "two")];
        }
        let by_rustls = ServerSettings::from(config);
        let by_freds = ServerSettings {
            tls: None,
            ..by_rustls.clone()
        };
        for (port, name) in [(1, Some("one")), (2, Some("two")), (3, None)] {
            let at = Server::new("localhost", port);
            assert_eq!(by_rustls.tls_name(&at).as_deref(), name);
            for settings in [&by_rustls, &by_freds] {
                let address = Address::Tcp(at.clone());
                let settings = ServerSettings {
                    address,
                    ..settings.clone()
                };
                let hosts = FredConfig::from(&settings).server.hosts();
                assert_eq!(hosts[0].tls_server_name.as_deref(), name);
            }
        }
    }

    /// The last octet of the address, before the default host.
    #[cfg(feature = "rustls")]
    #[derive(Debug)]
    struct Octet;

    #[cfg(feature = "rustls")]
    impl HostMapping for Octet {
        fn map(&self, ip: &IpAddr, default: &str) -> Option<String> {
            let ip = ip.to_string();
            let (_, octet) = ip.rsplit_once('.')?;
            Some(format!("{octet}.{default}"))
        }
    }

    /// Only for a cluster: a server that sentinels name is verified by the name that they give.
    #[cfg(feature = "rustls")]
    #[test]
    fn a_mapping_names_the_addresses_of_a_cluster() {
        use TlsHostMapping as M;
        let hosts = vec![("a.example", 1), ("10.0.0.2", 2)];
        let cluster = ServerConfig::new_clustered(hosts.clone());
        let sentinels = ServerConfig::new_sentinel(hosts, "m");
        for (server, hostnames, names) in [
            (&cluster, M::None, [None; 4]),
            (
                &cluster,
                M::DefaultHost,
                [
                    None,
                    Some("a.example"),
                    Some("a.example"),
                    Some("a.example"),
                ],
            ),
            (
                &cluster,
                M::Custom(Arc::new(Octet)),
                [None, Some("2.a.example"), Some("7.a.example"), None],
            ),
            (&sentinels, M::DefaultHost, [None; 4]),
        ] {
            let mut tls: TlsConfig = TlsConnector::default_rustls().unwrap().into();
            tls.hostnames = hostnames;
            let settings = ServerSettings::from(FredConfig {
                server: server.clone(),
                tls: Some(tls),
                ..FredConfig::default()
            });
            let hosts = ["b.example", "10.0.0.2", "10.0.0.7", "[::1]"];
            let found = hosts.map(|host| settings.tls_name(&Server::new(host, 9)));
            assert_eq!(found.each_ref().map(Option::as_deref), names);
        }
    }

    /// Returns the requested server as the user.
    #[derive(Debug)]
    struct Echo;

    #[async_trait]
    impl FredProvider for Echo {
        async fn fetch(
            &self,
            server: Option<&FredServer>,
        ) -> Result<(Option<String>, Option<String>), fred::error::Error> {
            let user = server.map(|at| format!("{}:{}", at.host, at.port));
            Ok((user, Some("pw".to_owned())))
        }
    }

    #[tokio::test]
    async fn a_provider_is_told_what_fred_tells_it() {
        for (url, told) in [
            ("redis://localhost:7", "localhost:7"),
            ("redis+unix:///run/a.sock", "/run/a.sock:0"),
        ] {
            let mut config = FredConfig::from_url(url).unwrap();
            config.credential_provider = Some(Arc::new(Echo));
            let settings = ServerSettings::from(config);
            let credentials = settings.credentials.unwrap();
            let login = credentials
                .provider
                .fetch(&settings.address)
                .await
                .unwrap()
                .login;
            assert_eq!(login.user.as_deref(), Some(told), "{url}");
        }
    }

    /// Returns a user, and no password.
    #[derive(Debug)]
    struct UserAlone;

    #[async_trait]
    impl FredProvider for UserAlone {
        async fn fetch(
            &self,
            _: Option<&FredServer>,
        ) -> Result<(Option<String>, Option<String>), fred::error::Error> {
            Ok((Some("app".to_owned()), None))
        }
    }

    /// Otherwise the connection would be that of the user `default`.
    #[tokio::test]
    async fn a_user_without_a_password_is_refused() {
        let config = FredConfig {
            credential_provider: Some(Arc::new(UserAlone)),
            ..FredConfig::default()
        };
        let settings = ServerSettings::from(config);
        let source = settings.credentials.unwrap();
        let refused = source.provider.fetch(&settings.address).await.unwrap_err();
        assert!(
            refused
                .error
                .to_string()
                .contains("a user without a password")
        );
    }
}
