//! The addresses of servers.

use std::{fmt, path::PathBuf, sync::Arc};

/// A host and a port.
///
/// For an example, see [`Address`].
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Server {
    /// A name or an IP address; an IPv6 address may be in brackets.
    pub host: Arc<str>,
    /// The port.
    pub port: u16,
}

impl Server {
    /// Returns the address of a host and a port.
    pub fn new(host: impl Into<Arc<str>>, port: u16) -> Self {
        Self {
            host: host.into(),
            port,
        }
    }

    /// Returns the host, without the brackets that an IPv6 address has in a URL.
    pub(crate) fn bare_host(&self) -> &str {
        bare(&self.host)
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// Returns a host without the brackets around an IPv6 address: URLs have them, and nothing else
/// accepts them.
pub(crate) fn bare(host: &str) -> &str {
    host.strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(host)
}

/// Where a server listens.
///
/// ```
/// use nestlock_wire::{Address, Server};
///
/// let address = Address::Tcp(Server::new("cache.example", 6379));
/// assert_eq!(address.to_string(), "cache.example:6379");
/// let address = Address::Unix("redis.sock".into());
/// assert_eq!(address.to_string(), "redis.sock");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Address {
    /// A host and a port.
    Tcp(Server),
    /// The path of a Unix socket.
    Unix(PathBuf),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(server) => server.fmt(f),
            Self::Unix(path) => path.display().fmt(f),
        }
    }
}
