//! Connects to one of a name's addresses: the attempts start a moment apart, and the first to
//! succeed wins (RFC 8305). An address that swallows packets costs a moment instead of the connect
//! timeout.

use std::{io, net::SocketAddr, time::Duration};

use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::{
    net::{TcpStream, lookup_host},
    time::sleep,
};

/// Delay before the next address is tried in parallel: the value that the RFC recommends.
const NEXT: Duration = Duration::from_millis(250);

/// Connects to a host at the first of its addresses that accepts. The caller sets the time limit.
pub(crate) async fn connect(host: &str, port: u16) -> io::Result<TcpStream> {
    first(addresses(host, port).await?).await
}

/// Returns the addresses in the system's order, with IPv6 and IPv4 alternating, so that neither
/// waits for all of the other.
pub(crate) async fn addresses(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    #[cfg(test)]
    if let Some(known) = tests::addresses(host) {
        return Ok(known);
    }
    Ok(by_turns(lookup_host((host, port)).await?))
}

fn by_turns(found: impl Iterator<Item = SocketAddr>) -> Vec<SocketAddr> {
    let (mut ours, mut others): (Vec<SocketAddr>, Vec<SocketAddr>) = (Vec::new(), Vec::new());
    for address in found {
        let is_ours = ours
            .first()
            .is_none_or(|first| first.is_ipv6() == address.is_ipv6());
        let family = if is_ours { &mut ours } else { &mut others };
        if !family.contains(&address) {
            family.push(address);
        }
    }
    let mut others = others.into_iter();
    let mut by_turns: Vec<_> = ours
        .into_iter()
        .flat_map(|address| [Some(address), others.next()])
        .flatten()
        .collect();
    by_turns.extend(others);
    by_turns
}

/// Connects to the first of these addresses that accepts.
pub(crate) async fn first(addresses: Vec<SocketAddr>) -> io::Result<TcpStream> {
    let (mut left, mut tried) = (addresses.into_iter(), FuturesUnordered::new());
    let mut failed = io::Error::new(io::ErrorKind::NotFound, "the host name has no address");
    loop {
        match left.next() {
            Some(address) => tried.push(TcpStream::connect(address)),
            None if tried.is_empty() => return Err(failed),
            None => {}
        }
        let is_last = left.len() == 0;
        tokio::select! {
            biased;
            Some(answer) = tried.next() => match answer {
                Ok(stream) => return Ok(stream),
                // the next pass tries another address at once
                Err(error) => failed = error,
            },
            () = sleep(NEXT), if !is_last => {}
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{
        collections::HashMap,
        net::{TcpListener, TcpStream as StdStream},
        sync::{Arc, LazyLock, Mutex},
        time::Instant,
    };

    use tokio::runtime::{Builder, Handle};

    use super::*;
    use crate::{dialer::Wire, link::Link, pace::Pace, tests::dialer};

    /// Names that tests have made up. Each belongs to one test, since tests run in parallel.
    static NAMES: LazyLock<Mutex<HashMap<String, Vec<SocketAddr>>>> = LazyLock::new(Mutex::default);

    pub(crate) fn addresses(host: &str) -> Option<Vec<SocketAddr>> {
        NAMES.lock().unwrap().get(host).cloned()
    }

    pub(crate) fn name(host: &str, addresses: &[SocketAddr]) {
        NAMES
            .lock()
            .unwrap()
            .insert(host.to_owned(), addresses.to_vec());
    }

    /// An address that swallows packets: a listening port whose backlog is full.
    struct Hole(
        SocketAddr,
        #[expect(dead_code, reason = "it is kept open")] socket2::Socket,
        Vec<StdStream>,
    );

    impl Hole {
        fn dig() -> Self {
            let socket =
                socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
            socket
                .bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into())
                .unwrap();
            socket.listen(0).unwrap();
            let at = socket.local_addr().unwrap().as_socket().unwrap();
            let mut hole = Self(at, socket, Vec::new());
            while let Ok(taken) = StdStream::connect_timeout(&at, Duration::from_millis(300)) {
                hole.2.push(taken);
                assert!(hole.2.len() < 10_000, "the backlog never fills up");
            }
            hole
        }
    }

    #[test]
    fn families_take_turns() {
        let [six, other_six, third_six] =
            ["[::1]:1", "[::2]:1", "[::3]:1"].map(|address| address.parse().unwrap());
        let [four, other_four] = ["1.0.0.1:1", "1.0.0.2:1"].map(|address| address.parse().unwrap());
        for (found, tried) in [
            (
                vec![six, other_six, third_six, four, other_four],
                vec![six, four, other_six, other_four, third_six],
            ),
            (vec![four, six, other_six, six], vec![four, six, other_six]),
            (vec![four, other_four, four], vec![four, other_four]),
            (vec![], vec![]),
        ] {
            assert_eq!(by_turns(found.into_iter()), tried);
        }
    }

    /// Covers the first connection and reconnects, with either client.
    #[test]
    fn a_dead_first_address_costs_a_moment_each_time() {
        let server = nestlock_embedded::SpawnedServer::start().unwrap();
        let hole = Hole::dig();
        name("a.hole.and.a.server", &[hole.0, server.addr()]);
        let own = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let wires = [
            Wire::Own,
            #[cfg(feature = "fred")]
            Wire::Fred,
        ];
        for wire in wires {
            own.block_on(async {
                let port = server.addr().port();
                let mut dial = dialer("a.hole.and.a.server", port, Handle::current());
                dial.wire = wire;
                dial.first_limit = Duration::from_secs(20);
                dial.settings.connect_timeout = dial.first_limit;
                let begun = Instant::now();
                let link = Link::connect(dial, &Arc::new(Pace::new())).await.unwrap();
                assert!(
                    begun.elapsed() < Duration::from_secs(5),
                    "{wire:?}: {:?}",
                    begun.elapsed()
                );
                for _ in 0..3 {
                    let begun = Instant::now();
                    link.reset().await;
                    link.wait_up().await;
                    assert!(
                        begun.elapsed() < Duration::from_secs(5),
                        "{wire:?}: {:?}",
                        begun.elapsed()
                    );
                    link.barrier().await.unwrap();
                }
                link.abandon();
            });
        }
    }

    /// Covers the client for the caller's own queries.
    #[cfg(feature = "fred")]
    #[tokio::test]
    async fn a_client_of_freds_is_connected_past_a_dead_address() {
        use fred::types::config::{ConnectionConfig, PerformanceConfig};
        let server = nestlock_embedded::SpawnedServer::start().unwrap();
        let hole = Hole::dig();
        name("a.hole.before.a.server", &[hole.0, server.addr()]);
        let url = format!("redis://a.hole.before.a.server:{}", server.addr().port());
        let config = fred::types::config::Config::from_url(&url).unwrap();
        let limit = Duration::from_secs(20);
        let connection = ConnectionConfig {
            connection_timeout: limit,
            internal_command_timeout: limit,
            ..ConnectionConfig::default()
        };
        let begun = Instant::now();
        crate::fred_client(&config, PerformanceConfig::default(), connection)
            .await
            .unwrap();
        assert!(
            begun.elapsed() < Duration::from_secs(5),
            "{:?}",
            begun.elapsed()
        );
    }

    #[tokio::test]
    async fn the_first_address_that_answers_is_taken() {
        let holes = [Hole::dig(), Hole::dig()];
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let there = listener.local_addr().unwrap();
        let closed = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap();
        for (addresses, at_least) in [
            (vec![there, holes[0].0], 0),
            (vec![holes[0].0, there], 1),
            (vec![holes[0].0, holes[1].0, there], 2),
            // a refused attempt delays nothing
            (vec![closed, closed, there], 0),
            (vec![holes[0].0, closed, there], 1),
        ] {
            let (begun, what) = (Instant::now(), format!("{addresses:?}"));
            let stream = first(addresses)
                .await
                .unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_eq!(stream.peer_addr().unwrap(), there, "{what}");
            let took = begun.elapsed();
            assert!(
                took >= NEXT * at_least && took < NEXT * (at_least + 3),
                "{what}: {took:?}"
            );
        }
        assert_eq!(
            first(vec![closed, closed]).await.unwrap_err().kind(),
            io::ErrorKind::ConnectionRefused
        );
        assert_eq!(
            first(Vec::new()).await.unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
    }
}
