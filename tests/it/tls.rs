//! TLS: certificates are checked, and the client never falls back to plain text.

pub mod certificates;
#[cfg(feature = "fred")]
mod names;
mod refused;

use std::{
    fs, io,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

#[cfg(feature = "fred")]
use nestlock::fred::types::config::Config as FredConfig;
use nestlock::{AcquireOptions, Error, LockClient, LockClientBuilder, Tls};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    runtime::Builder,
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{ServerConfig, crypto::ring::default_provider, pki_types::PrivateKeyDer},
};

use crate::support::{
    Server, eventually,
    proxy::{Proxy, Request, Verb},
};

/// A server with a certificate for `localhost`, and the authority that signed it.
pub struct TlsServer {
    server: Server,
    port: u16,
    /// In PEM.
    pub authority: String,
    _folder: tempfile::TempDir,
}

impl TlsServer {
    pub fn url(&self) -> String {
        format!("rediss://localhost:{}", self.port)
    }

    /// Returns a builder that trusts the server's authority.
    pub fn builder(&self) -> LockClientBuilder {
        LockClient::builder().tls(Tls::new().ca_pem(&*self.authority))
    }

    /// Returns a configuration of fred's that connects to this server and trusts its authority.
    #[cfg(feature = "fred")]
    pub fn config(&self) -> FredConfig {
        self.builder().fred_config(self.url(), None).unwrap()
    }
}

pub fn start() -> TlsServer {
    let signed = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let (authority, key) = (signed.cert.pem(), signed.signing_key.serialize_pem());
    let (server, port, folder) = serve([&authority, &key, &authority], &[]);
    TlsServer {
        server,
        port,
        authority,
        _folder: folder,
    }
}

/// Returns the arguments of a node that speaks TLS with others, on this port.
fn as_node(bus: &str) -> [&str; 6] {
    [
        "--cluster-enabled",
        "yes",
        "--tls-cluster",
        "yes",
        "--cluster-port",
        bus,
    ]
}

/// A cluster whose nodes speak TLS with each other and with clients. Each also has a port without
/// TLS, for the test.
pub struct TlsCluster {
    nodes: Vec<TlsServer>,
}

impl TlsCluster {
    /// Starts this many masters, and waits until the cluster serves.
    pub async fn start(masters: usize) -> Self {
        let by = certificates::authority("servers");
        let [cert, key] = certificates::signed(&by, &["localhost", "127.0.0.1"]);
        let start = |_| {
            let bus = certificates::dead_port().to_string();
            let args = as_node(&bus);
            let (server, port, folder) = serve([&cert, &key, &by.pem()], &args);
            let node = TlsServer {
                server,
                port,
                authority: by.pem(),
                _folder: folder,
            };
            (node, bus)
        };
        let (nodes, buses): (Vec<_>, Vec<_>) = (0..masters).map(start).unzip();
        let first = (nodes[0].port.to_string(), &buses[0]);
        for (n, node) in nodes.iter().enumerate() {
            let slot = |n: usize| n * 16_384 / masters;
            let (from, to) = (slot(n).to_string(), (slot(n + 1) - 1).to_string());
            let epoch = (n + 1).to_string();
            for words in [
                &["CLUSTER", "ADDSLOTSRANGE", &from, &to][..],
                &["CLUSTER", "SET-CONFIG-EPOCH", &epoch],
                &["CLUSTER", "MEET", "127.0.0.1", &first.0, first.1],
            ] {
                let reply = node.server.call(words);
                assert_eq!(reply.text(), "OK", "{words:?}");
            }
        }
        let serves = || async {
            nodes.iter().all(|node| {
                let info = node.server.call(&["CLUSTER", "INFO"]);
                let knows = format!("cluster_known_nodes:{masters}\r");
                info.text().contains("cluster_state:ok") && info.text().contains(&knows)
            })
        };
        eventually("the cluster serves", serves).await;
        Self { nodes }
    }

    pub fn url(&self) -> String {
        format!("rediss-cluster://localhost:{}", self.nodes[0].port)
    }

    /// Returns a builder that trusts the nodes' authority.
    pub fn builder(&self) -> LockClientBuilder {
        self.nodes[0].builder()
    }

    /// Returns the ports without TLS.
    pub fn addrs(&self) -> Vec<SocketAddr> {
        self.nodes.iter().map(|node| node.server.addr()).collect()
    }
}

/// Starts a server with a TLS port, for clients without a certificate, from its own certificate,
/// its key and the certificate of its authority.
fn serve([cert, key, ca]: [&str; 3], args: &[&str]) -> (Server, u16, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, pem: &str| {
        let path = folder.path().join(name);
        fs::write(&path, pem).unwrap();
        path.display().to_string()
    };
    let (cert, key, ca) = (
        file("cert.pem", cert),
        file("key.pem", key),
        file("ca.pem", ca),
    );
    let port = certificates::dead_port();
    let tls_port = port.to_string();
    let mut words = vec![
        "--tls-port",
        &tls_port,
        "--tls-cert-file",
        &cert,
        "--tls-key-file",
        &key,
        "--tls-ca-cert-file",
        &ca,
        "--tls-auth-clients",
        "no",
    ];
    words.extend(args);
    (Server::start_with(&words), port, folder)
}

#[tokio::test]
async fn locks_work_over_tls_with_a_certificate_authority_of_ones_own() {
    let server = start();
    let a = server.builder().connect(server.url()).await.unwrap();
    let b = server.builder().connect(server.url()).await.unwrap();
    let guard = a.reentrant_lock("l").unwrap().lock().await.unwrap();
    let theirs = b.reentrant_lock("l").unwrap();
    assert!(theirs.try_lock().await.unwrap().is_none());
    let waiter = tokio::spawn(async move { theirs.lock().await.unwrap().unlock().await });
    guard.unlock().await.unwrap();
    waiter.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_certificate_without_a_trusted_authority_is_refused() {
    let server = start();
    let stranger = Tls::new().ca_pem(certificates::authority("others").pem());
    let outcome = LockClient::builder()
        .tls(stranger)
        .connect(server.url())
        .await;
    assert!(matches!(outcome, Err(Error::Connect { .. })), "{outcome:?}");
    // the system does not trust it either
    let outcome = LockClient::connect(server.url()).await;
    assert!(matches!(outcome, Err(Error::Connect { .. })), "{outcome:?}");
}

#[tokio::test]
async fn a_server_without_tls_is_never_spoken_to_in_plain_text() {
    let server = Server::start();
    let url = format!("rediss://localhost:{}", server.addr().port());
    let outcome = LockClient::builder()
        .connect_timeout(Duration::from_secs(3))
        .connect(url)
        .await;
    assert!(matches!(outcome, Err(Error::Connect { .. })), "{outcome:?}");
    assert_eq!(server.command_count("hello"), 0);
}

/// How many bytes a socket takes from a client before it is reset.
const TAKEN: usize = 100_000;
/// How many requests that is at least.
const REQUESTS_TAKEN: usize = 50;

/// A server's socket. Once `is_cut` is set, it takes bytes that reach nothing, and is then reset.
struct CutSocket {
    socket: TcpStream,
    is_cut: Arc<AtomicBool>,
    taken: usize,
}

impl AsyncRead for CutSocket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let cut = self.get_mut();
        while cut.is_cut.load(Ordering::Acquire) {
            let mut bytes = [0; 1 << 14];
            let mut bytes = ReadBuf::new(&mut bytes);
            ready!(Pin::new(&mut cut.socket).poll_read(cx, &mut bytes))?;
            cut.taken += bytes.filled().len();
            if bytes.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
            if cut.taken >= TAKEN {
                cut.is_cut.store(false, Ordering::Release);
                cut.socket.set_zero_linger()?;
                return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
            }
        }
        Pin::new(&mut cut.socket).poll_read(cx, buf)
    }
}

impl AsyncWrite for CutSocket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().socket).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_shutdown(cx)
    }
}

/// Terminates TLS for a server without it.
async fn speak_tls(
    acceptor: TlsAcceptor,
    listener: TcpListener,
    server: SocketAddr,
    is_cut: Arc<AtomicBool>,
) {
    while let Ok((socket, _)) = listener.accept().await {
        let (acceptor, is_cut) = (acceptor.clone(), Arc::clone(&is_cut));
        let client = CutSocket {
            socket,
            is_cut,
            taken: 0,
        };
        tokio::spawn(async move {
            let mut client = acceptor.accept(client).await?;
            tokio::io::copy_bidirectional(&mut client, &mut TcpStream::connect(server).await?).await
        });
    }
}

/// TLS may have sent any bytes that it accepted before it reports an error, so none of them is sent
/// again. The socket is reset while the client still writes: it takes bytes faster than the client
/// encrypts them.
#[test]
fn nothing_is_sent_twice_over_tls_when_the_connection_is_reset() {
    let server = Server::start();
    let signed = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = PrivateKeyDer::Pkcs8(signed.signing_key.serialize_der().into());
    let serving = ServerConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![signed.cert.der().clone()], key)
        .unwrap();
    let proxy = Proxy::start(&server);
    let fronts = Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let listener = fronts.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let url = format!(
        "rediss://localhost:{}",
        listener.local_addr().unwrap().port()
    );
    let is_cut = Arc::new(AtomicBool::new(false));
    fronts.spawn(speak_tls(
        TlsAcceptor::from(Arc::new(serving)),
        listener,
        proxy.addr(),
        Arc::clone(&is_cut),
    ));
    // on one thread, all tasks send before anything is written
    let single = Builder::new_current_thread().enable_all().build().unwrap();
    single.block_on(async {
        let client = LockClient::builder()
            .tls(Tls::new().ca_pem(signed.cert.pem()))
            .connect(url)
            .await
            .unwrap();
        let warm = client.reentrant_lock("warm").unwrap();
        warm.lock().await.unwrap().unlock().await.unwrap();
        for round in 0..4 {
            proxy.forget_requests();
            is_cut.store(true, Ordering::Release);
            let tasks: Vec<_> = (0..1_000)
                .map(|n| {
                    let lock = client
                        .reentrant_lock(format!("{round}:{n}:{}", "x".repeat(400)))
                        .unwrap();
                    tokio::spawn(async move {
                        let options = AcquireOptions::new().lease(Duration::from_secs(20));
                        if let Ok(Some(guard)) = lock.try_lock_with(options).await {
                            let _ = guard.leave_to_lease();
                        }
                    })
                })
                .collect();
            for task in tasks {
                task.await.unwrap();
            }
            assert!(!is_cut.load(Ordering::Acquire), "not cut in round {round}");
            // what is in doubt is released first: the next reset must not hit those requests
            client.idle().await;
            warm.lock().await.unwrap().unlock().await.unwrap();
            let acquires = proxy.seen(Verb::Acquire);
            assert!(!acquires.is_empty(), "none was sent later in round {round}");
            for n in 0..REQUESTS_TAKEN {
                let name = format!("{round}:{n}:");
                let is_its =
                    |acquire: &Request| acquire.keys().iter().any(|key| key.contains(&name));
                assert!(
                    !acquires.iter().any(is_its),
                    "{name} was sent twice, of {}",
                    acquires.len()
                );
            }
        }
    });
    fronts.shutdown_background();
}
