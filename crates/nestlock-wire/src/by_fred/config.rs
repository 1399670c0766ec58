//! Settings from a configuration of fred's, and the other way.

use std::sync::Arc;

use async_trait::async_trait;
#[cfg(feature = "rustls")]
use fred::types::config::TlsConnector;
use fred::types::config::{
    Config as FredConfig, CredentialProvider, Server as FredServer, ServerConfig,
};

#[cfg(feature = "rustls")]
use crate::settings::TlsSettings;
use crate::{
    address::{Address, Server},
    failure::NotConnected,
    settings::{Credentials, Login, ServerSettings},
};

impl From<&FredServer> for Server {
    fn from(server: &FredServer) -> Self {
        Self::new(&*server.host, server.port)
    }
}

/// Credentials that a provider of fred's fetches.
struct FromProvider(Arc<dyn CredentialProvider>);

#[async_trait]
impl Credentials for FromProvider {
    async fn fetch(&self, address: &Address) -> Result<Login, NotConnected> {
        let server = match address {
            Address::Tcp(server) => Some(FredServer::new(&*server.host, server.port)),
            Address::Unix(_) => None,
        };
        let fetched = self.0.fetch(server.as_ref()).await;
        let (user, password) = fetched.map_err(|error| NotConnected::from_fred(&error, false))?;
        Ok(Login { user, password })
    }
}

impl From<FredConfig> for ServerSettings {
    /// Takes the first address. A name for the servers' certificates counts if all addresses have
    /// it.
    fn from(config: FredConfig) -> Self {
        let hosts = config.server.hosts();
        let address = match (&config.server, hosts.first()) {
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
            let first = hosts.first().and_then(|host| host.tls_server_name.as_ref());
            let is_shared = hosts
                .iter()
                .all(|host| host.tls_server_name.as_ref() == first);
            Some(TlsSettings {
                connector: connector.clone(),
                server_name: first.filter(|_| is_shared).map(|name| (&**name).into()),
            })
        });
        let credentials = config.credential_provider.clone();
        Self {
            address,
            login: Login {
                user: config.username.clone(),
                password: config.password.clone(),
            },
            credentials: credentials
                .map(|provider| Arc::new(FromProvider(provider)) as Arc<dyn Credentials>),
            database: config.database,
            #[cfg(feature = "rustls")]
            tls,
            fred: Some(Arc::new(config)),
        }
    }
}

impl From<&ServerSettings> for FredConfig {
    fn from(settings: &ServerSettings) -> Self {
        let mut config = settings.fred.as_deref().cloned().unwrap_or_default();
        config.server = match &settings.address {
            Address::Unix(path) => ServerConfig::Unix { path: path.clone() },
            Address::Tcp(at) => {
                let server = FredServer::new(&*at.host, at.port);
                #[cfg(feature = "rustls")]
                let server = FredServer {
                    tls_server_name: settings
                        .tls
                        .as_ref()
                        .and_then(|tls| Some((&**tls.server_name.as_ref()?).into())),
                    ..server
                };
                ServerConfig::Centralized { server }
            }
        };
        let Login { user, password } = settings.login.clone();
        (config.username, config.password) = (user, password);
        if settings.credentials.is_none() {
            config.credential_provider = None;
        }
        config.database = settings.database;
        #[cfg(feature = "rustls")]
        if let Some(tls) = &settings.tls {
            let connector = TlsConnector::Rustls(tls.connector.clone());
            config.tls.get_or_insert_with(|| connector.into());
        }
        config
    }
}

#[cfg(test)]
mod tests {
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

    /// As where the feature `rustls` is off, and another crate asks fred for its TLS: a password
    /// must not be sent in plain text.
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
}
