//! Where the servers are and how to log in, from fred's configuration; and such a configuration for
//! connections that are not nestlock's.

use fred::{
    clients::Client,
    types::config::{
        Config as FredConfig, ConnectionConfig, PerformanceConfig, Server as FredServer,
        ServerConfig,
    },
};
use nestlock_wire::{Address, Login, Server, ServerSettings, Wire, fred_client};

use crate::{
    error::{Result, StoreError},
    store::{
        endpoint::{Deployment, Endpoint, Sentinels},
        url::refuse,
    },
    topology::{NodeRole, TopologyNode},
};

impl From<FredConfig> for Endpoint {
    fn from(config: FredConfig) -> Self {
        let servers = |hosts: &[FredServer]| hosts.iter().map(Server::from).collect();
        let place = match &config.server {
            ServerConfig::Clustered { hosts, .. } => Deployment::Cluster(servers(hosts)),
            ServerConfig::Sentinel {
                hosts,
                service_name,
                username,
                password,
            } => {
                let login = (username.is_some() || password.is_some()).then(|| Login {
                    user: username.clone(),
                    password: password.clone(),
                });
                Deployment::Sentinel(Sentinels {
                    at: servers(hosts),
                    service: service_name.clone(),
                    login,
                })
            }
            // one server, by its host or its socket
            _ => Deployment::Server,
        };
        let server = ServerSettings::from(config);
        let wire = server.is_by_freds_tls().then_some(Wire::Fred);
        Self::new(server, place, wire)
    }
}

impl Endpoint {
    /// Returns the configuration of a separate connection to one of the servers or sentinels; to
    /// the first address if `node` is `None`, or if there is a single server.
    pub(crate) fn leads_to(
        &self,
        node: Option<&TopologyNode>,
        sentinel_login: Option<&Login>,
    ) -> Result<FredConfig> {
        let mut server = self.server.clone();
        let Some(node) = node.filter(|_| !matches!(self.place, Deployment::Server)) else {
            return Ok(FredConfig::from(&server));
        };
        let address = node
            .address
            .rsplit_once(':')
            .and_then(|(host, port)| Some((host, port.parse().ok()?)));
        let Some((host, port)) = address else {
            return refuse(format!("{} is not the address of a server", node.address));
        };
        server.address = Address::Tcp(Server::new(host, port));
        if node.role == NodeRole::Sentinel {
            server.database = None;
            let own = if let Deployment::Sentinel(sentinels) = &self.place {
                sentinels.login.as_ref()
            } else {
                None
            };
            if let Some(login) = own.or(sentinel_login) {
                server.login = login.clone();
                server.credentials = None;
            }
        }
        Ok(FredConfig::from(&server))
    }

    /// Connects a fred client in the way that nestlock itself connects: it tries each address of a
    /// name, and no error quotes a password. The caller must limit the time. Unstable.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: if dropped, it closes the connection.
    #[doc(hidden)]
    pub async fn client(
        config: &FredConfig,
        performance: PerformanceConfig,
        connection: ConnectionConfig,
    ) -> Result<Client, StoreError> {
        fred_client(config, performance, connection).await
    }
}
