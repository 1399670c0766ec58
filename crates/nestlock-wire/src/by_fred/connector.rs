//! Connects fred's client: past addresses that swallow packets, and without retries.

use std::{io, net::SocketAddr, pin::pin, time::Duration};

use fred::{
    clients::Client,
    error::Error as FredError,
    interfaces::ClientLike,
    types::{
        Builder, ClusterHash, ConnectHandle, CustomCommand, RespVersion, Value,
        config::{Config as FredConfig, ConnectionConfig, PerformanceConfig, Server, ServerConfig},
    },
};

use futures_util::FutureExt;
use tokio::task::AbortHandle;

use crate::{
    address::bare,
    error::{StoreError, StoreErrorKind},
    failure::NotConnected,
    limits::MAX_IN_FLIGHT,
    reach,
    settings::{ConnectionSettings, ServerSettings},
};

/// How many messages may wait for the receiver. Beyond this, fred drops the oldest and reports the
/// loss. fred has nine channels of this capacity for each client and preallocates all of them: 2.4
/// MB. With 1,024, a script that publishes 1,500 messages at once would wake every waiter.
const MESSAGE_CAPACITY: usize = 4096;
/// The same capacity for a connection without messages.
const NEWS_CAPACITY: usize = 32;

/// The longest user and password that fred can send, in bytes: both must fit into one line, which
/// the server limits to 64 KiB.
const MOST_INLINE: usize = 16 * 1024;

/// Refuses an address or a login that fred cannot use. It writes user and password into a line of
/// text as they are: the server would take what comes after a space as another argument, and after
/// a line break as another command.
pub(super) fn can_be_sent(server: &ServerSettings) -> Result<(), NotConnected> {
    #[cfg(not(unix))]
    if matches!(server.address, crate::address::Address::Unix(_)) {
        return Err(std::io::Error::other("this system has no Unix sockets").into());
    }
    let login = &server.login;
    let is_plain = |word: &String| {
        (1..=MOST_INLINE).contains(&word.len())
            && !word.contains(|c: char| {
                c.is_ascii_whitespace() || c.is_ascii_control() || "\"'".contains(c)
            })
    };
    if [&login.user, &login.password]
        .into_iter()
        .flatten()
        .all(is_plain)
    {
        return Ok(());
    }
    Err(NotConnected::new(
        StoreErrorKind::Other,
        "fred's client cannot send a user or a password that is empty, longer than 16 KiB, or that contains white \
         space, quotes or control characters; leave out `wire=fred`",
    ))
}

/// Returns the configuration with the address that accepts connections: fred would try a name's
/// addresses one after the other.
///
/// The certificate must still have the name. The field for it is known to be in fred's `Server`
/// only with the feature `rustls`. Without that feature, another crate may have enabled the field
/// together with fred's TLS, which no `cfg` here can see. The host then stays as it is, and fred
/// tries its addresses.
pub(super) async fn reachable(mut server: FredConfig) -> io::Result<FredConfig> {
    if cfg!(not(feature = "rustls")) && server.uses_tls() {
        return Ok(server);
    }
    if let ServerConfig::Centralized { server: at } = &mut server.server
        && let Some(address) = which(bare(&at.host), at.port).await?
    {
        let known = Server::new(address.ip().to_string(), at.port);
        #[cfg(feature = "rustls")]
        let known = Server {
            tls_server_name: at.tls_server_name.clone().or_else(|| Some(at.host.clone())),
            ..known
        };
        *at = known;
    }
    Ok(server)
}

/// Returns the address that accepts, for a client that would try one after the other. Returns
/// `None` if the host has only one.
async fn which(host: &str, port: u16) -> io::Result<Option<SocketAddr>> {
    let addresses = reach::addresses(host, port).await?;
    if addresses.len() < 2 {
        return Ok(None);
    }
    reach::first(addresses).await?.peer_addr().map(Some)
}

/// Builds a client that sends each command at most once, with limits on everything.
pub(super) fn build(
    settings: &ConnectionSettings,
    mut server: FredConfig,
) -> Result<Client, NotConnected> {
    server.version = RespVersion::RESP3; // pushes and replies on one connection
    server.fail_fast = true;
    let mut builder = Builder::from_config(server);
    // no reconnect policy: `Pace` has one, for all links
    builder.with_connection_config(|connection| {
        connection.max_command_attempts = 1; // a replayed release would free the next hold
        connection.max_redirections = 0;
        connection.connection_timeout = settings.connect_timeout;
        connection.internal_command_timeout = settings.connect_timeout.min(Duration::from_secs(2));
        connection.max_command_buffer_len = MAX_IN_FLIGHT;
        connection.tcp.nodelay = Some(true);
    });
    builder.with_performance_config(|performance| {
        performance.default_command_timeout = settings.command_timeout;
        performance.broadcast_channel_capacity = if settings.sink.is_some() {
            MESSAGE_CAPACITY
        } else {
            NEWS_CAPACITY
        };
    });
    builder
        .build()
        .map_err(|error| NotConnected::from_fred(&error, false))
}

/// Connects a fred client for the caller's own queries in the way that nestlock's own are
/// connected: to the address that accepts connections, and with no password in an error.
///
/// # Cancel safety
///
/// Cancel safe: if dropped midway, the connection is closed.
///
/// ```no_run
/// # use fred::interfaces::ClientLike;
/// # use fred::types::config::Config;
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let server = Config::from_url("redis://127.0.0.1:6379")?;
/// let client = nestlock_wire::fred_client(&server, Default::default(), Default::default()).await?;
/// client.quit().await?;
/// # Ok(())
/// # }
/// ```
pub async fn fred_client(
    server: &FredConfig,
    performance: PerformanceConfig,
    connection: ConnectionConfig,
) -> Result<Client, StoreError> {
    let has_password = server.password.is_some() || server.credential_provider.is_some();
    let connected = async {
        let client = Client::new(
            reachable(server.clone()).await?,
            Some(performance),
            Some(connection),
            None,
        );
        start(&client)
            .await
            .map_err(|error| NotConnected::from_fred(&error, has_password))?;
        Ok(client)
    };
    connected
        .await
        .map_err(|failed: NotConnected| failed.error.before_any_request())
}

/// Connects a client. fred's `init` leaves the task that has the connection behind if it is dropped
/// midway; this does not.
pub(super) async fn start(client: &Client) -> Result<ConnectHandle, FredError> {
    struct AbortOnDrop {
        router: AbortHandle,
        is_connected: bool,
    }
    impl Drop for AbortOnDrop {
        fn drop(&mut self) {
            if !self.is_connected {
                self.router.abort();
            }
        }
    }
    // the first poll subscribes; it comes before the router starts, so that no outcome is missed
    let mut connected = pin!(client.wait_for_connect());
    let at_once = connected.as_mut().now_or_never();
    let router = client.connect();
    let mut abort = AbortOnDrop {
        router: router.abort_handle(),
        is_connected: false,
    };
    match at_once {
        Some(connected) => connected?,
        None => connected.await?,
    }
    abort.is_connected = true;
    Ok(router)
}

/// Sets the connection's name, without waiting for the reply: nothing depends on it.
pub(super) fn set_name(client: &Client, settings: &ConnectionSettings) {
    let (client, name) = (client.clone(), settings.name.to_string());
    settings.own.spawn(async move {
        let hello = CustomCommand::new_static("HELLO", ClusterHash::FirstKey, false);
        let _ = client
            .custom::<Value, _>(hello, vec!["3", "SETNAME", &name])
            .await;
    });
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// Also if another crate enables fred's TLS while this crate's feature `rustls` is off: with
    /// `--no-default-features --features fred/enable-rustls-ring`.
    #[tokio::test]
    async fn a_host_of_several_addresses_is_verified_by_name() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        reach::tests::name("several.for.tls", &[at, ([127, 0, 0, 2], at.port()).into()]);
        let url = format!("rediss://several.for.tls:{}", at.port());
        // without any TLS, fred refuses the URL, or ignores its scheme
        let Some(config) = FredConfig::from_url(&url).ok().filter(FredConfig::uses_tls) else {
            return;
        };
        let found = reachable(config).await.unwrap().server.hosts().remove(0);
        #[cfg(feature = "rustls")]
        assert_eq!(
            (&*found.host, found.tls_server_name.as_deref()),
            ("127.0.0.1", Some("several.for.tls"))
        );
        #[cfg(not(feature = "rustls"))]
        assert_eq!(&*found.host, "several.for.tls");
    }
}
