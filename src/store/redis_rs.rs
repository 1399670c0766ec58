//! Where the server is and how to log in, from a configuration of the `redis` crate (redis-rs).

use nestlock_wire::{Address, Server, ServerSettings};
use redis::{ConnectionAddr, ConnectionInfo};

use crate::{
    error::{Error, Result},
    store::{
        endpoint::{Deployment, Endpoint},
        url::{login_of, refuse},
    },
};

impl TryFrom<ConnectionInfo> for Endpoint {
    type Error = Error;

    fn try_from(info: ConnectionInfo) -> Result<Self> {
        let address = address(info.addr())?;
        let redis = info.redis_settings();
        let Ok(database) = u8::try_from(redis.db()) else {
            return refuse(format!("{} is no database; use 0 to 255", redis.db()));
        };
        let server = ServerSettings {
            login: login_of(
                redis.username().map(Into::into),
                redis.password().map(Into::into),
            )?
            .unwrap_or_default(),
            database: Some(database),
            ..ServerSettings::new(address)
        };
        let endpoint = Self::new(server, Deployment::Server, None);
        #[cfg(feature = "rustls")]
        let endpoint = endpoint.by_tls(matches!(info.addr(), ConnectionAddr::TcpTls { .. }));
        Ok(endpoint)
    }
}

fn address(addr: &ConnectionAddr) -> Result<Address> {
    match addr {
        ConnectionAddr::Unix(path) => Ok(Address::Unix(path.clone())),
        ConnectionAddr::TcpTls { .. } if !cfg!(feature = "rustls") => {
            refuse("TLS needs rustls; enable the feature `rustls` of nestlock")
        }
        ConnectionAddr::TcpTls { insecure: true, .. } => refuse(
            "the configuration of redis-rs is `insecure`; nestlock always checks the name in a certificate: set \
             `LockClientBuilder::tls` with `Tls::server_name`",
        ),
        ConnectionAddr::TcpTls {
            tls_params: Some(_),
            ..
        } => refuse(
            "redis-rs does not give out the certificates in its configuration; leave out its `tls_params`, and set \
             `LockClientBuilder::tls`",
        ),
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
            Ok(Address::Tcp(Server::new(&**host, *port)))
        }
        _ => refuse("the configuration of redis-rs has an address of an unknown sort"),
    }
}
