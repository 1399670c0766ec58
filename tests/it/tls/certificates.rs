//! Custom certificates: which authorities are trusted, and which client certificate is sent.

use std::{
    fs,
    process::{Child, Command, Stdio},
    time::Duration,
};

use nestlock::{Error, LockClient, StoreErrorKind, Tls, Tuning};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};

use crate::support::{Server, WIRES, eventually};

pub type Authority = CertifiedIssuer<'static, KeyPair>;

pub fn authority(name: &str) -> Authority {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, name);
    Authority::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// Returns a certificate for these names and its key, in PEM.
pub(super) fn signed(by: &Authority, names: &[&str]) -> [String; 2] {
    let mut params = CertificateParams::new(
        names
            .iter()
            .map(|name| (*name).to_owned())
            .collect::<Vec<_>>(),
    )
    .unwrap();
    params
        .distinguished_name
        .push(DnType::CommonName, "somebody");
    let key = KeyPair::generate().unwrap();
    [
        params.signed_by(&key, by).unwrap().pem(),
        key.serialize_pem(),
    ]
}

/// A server that requires client certificates; its own is for `redis.internal`.
pub(super) struct Guarded {
    server: Server,
    pub(super) port: u16,
    /// The authority that signed the server's certificate.
    pub(super) servers: Authority,
    /// The authority that the server trusts.
    pub(super) clients: Authority,
    folder: tempfile::TempDir,
}

pub(super) fn dead_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}

impl Guarded {
    pub(super) fn start(args: &[&str]) -> Self {
        let (servers, clients) = (authority("servers"), authority("clients"));
        let folder = tempfile::tempdir().unwrap();
        let [cert, key] = signed(&servers, &["redis.internal"]);
        for (name, pem) in [
            ("cert.pem", cert),
            ("key.pem", key),
            ("ca.pem", clients.pem() + &servers.pem()),
        ] {
            fs::write(folder.path().join(name), pem).unwrap();
        }
        let port = dead_port();
        let mut words: Vec<String> = vec!["--tls-port".into(), port.to_string()];
        words.extend(Self::tls(&folder, "--"));
        words.extend(args.iter().map(|word| (*word).to_owned()));
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        Self {
            server: Server::start_with(&words),
            port,
            servers,
            clients,
            folder,
        }
    }

    fn tls(folder: &tempfile::TempDir, dashes: &str) -> Vec<String> {
        let file = |name: &str| folder.path().join(name).display().to_string();
        let settings = [
            ("tls-cert-file", file("cert.pem")),
            ("tls-key-file", file("key.pem")),
            ("tls-ca-cert-file", file("ca.pem")),
            ("tls-auth-clients", "yes".into()),
        ];
        settings
            .into_iter()
            .flat_map(|(name, value)| [format!("{dashes}{name}"), value])
            .collect()
    }

    /// Returns options that the server accepts.
    fn tls_of_a_friend(&self) -> Tls {
        let [cert, key] = signed(&self.clients, &["client"]);
        Tls::new()
            .ca_pem(self.servers.pem())
            .server_name("redis.internal")
            .client_cert_pem(cert, key)
    }

    fn url(&self, scheme: &str) -> String {
        format!("{scheme}://127.0.0.1:{}", self.port)
    }

    async fn refuses(&self, tls: Tls) -> String {
        let before = self.server.command_count("hello");
        let builder = LockClient::builder()
            .connect_timeout(Duration::from_secs(5))
            .tls(tls);
        let error = builder.connect(self.url("rediss")).await.unwrap_err();
        assert!(matches!(error, Error::Connect { .. }), "{error:?}");
        assert_eq!(self.server.command_count("hello"), before);
        format!("{error} {error:?}")
    }
}

impl Guarded {
    /// Asserts that the error contains one of `words`. The server closes the connection at once, so
    /// its alert may be lost, often on a busy machine.
    async fn refuses_and_says(&self, words: &[&str], tls: impl Fn() -> Tls) {
        let mut said = String::new();
        for _ in 0..50 {
            said = self.refuses(tls()).await;
            if words.iter().any(|word| said.contains(word)) {
                return;
            }
        }
        panic!("{words:?} is not in: {said}");
    }
}

async fn a_lock_works(client: &LockClient) {
    client
        .mutex("l")
        .unwrap()
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    let (lock, waits) = (client.mutex("m").unwrap(), client.mutex("m").unwrap());
    let guard = lock.lock().await.unwrap();
    let waiter = tokio::spawn(async move { waits.lock().await.unwrap().unlock().await });
    eventually("it waits", || async { client.stats().waiters == 1 }).await;
    guard.unlock().await.unwrap();
    waiter.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_client_certificate_lets_in() {
    let server = Guarded::start(&[]);
    for &wire in WIRES {
        let builder = LockClient::builder()
            .tuning(Tuning {
                wire,
                ..Tuning::default()
            })
            .tls(server.tls_of_a_friend());
        a_lock_works(&builder.connect(server.url("rediss")).await.unwrap()).await;
    }
}

/// With TLS 1.3, the handshake is complete for the client before the server has seen that there is
/// no certificate.
#[tokio::test]
async fn no_client_connects_without_a_certificate_or_with_a_strangers() {
    for protocol in ["TLSv1.3", "TLSv1.2"] {
        let server = Guarded::start(&["--tls-protocols", protocol]);
        let base = || {
            Tls::new()
                .ca_pem(server.servers.pem())
                .server_name("redis.internal")
        };
        server
            .refuses_and_says(&["CertificateRequired", "HandshakeFailure"], base)
            .await;
        let [cert, key] = signed(&authority("strangers"), &["client"]);
        server
            .refuses_and_says(&["UnknownCA"], || {
                base().client_cert_pem(cert.clone(), key.clone())
            })
            .await;
    }
}

/// A server must have the expected name and an authority that is trusted.
#[tokio::test]
async fn a_server_needs_the_right_name_and_a_trusted_authority() {
    let server = Guarded::start(&[]);
    let [cert, key] = signed(&server.clients, &["client"]);
    let shown = || Tls::new().client_cert_pem(cert.clone(), key.clone());
    // by its address, without a name
    let said = server.refuses(shown().ca_pem(server.servers.pem())).await;
    assert!(said.contains("not valid for"), "{said}");
    let said = server
        .refuses(
            shown()
                .ca_pem(server.servers.pem())
                .server_name("other.internal"),
        )
        .await;
    assert!(said.contains("not valid for"), "{said}");
    let said = server
        .refuses(
            shown()
                .ca_pem(server.clients.pem())
                .server_name("redis.internal"),
        )
        .await;
    assert!(said.contains("UnknownIssuer"), "{said}");
    // several authorities
    let both = shown()
        .ca_pem(server.clients.pem())
        .ca_pem(server.servers.pem())
        .server_name("redis.internal");
    a_lock_works(
        &LockClient::builder()
            .tls(both)
            .connect(server.url("rediss"))
            .await
            .unwrap(),
    )
    .await;
}

/// Nodes announce addresses; their certificates are still checked against the configured name.
#[tokio::test]
async fn a_cluster_sees_the_certificate() {
    let bus = dead_port().to_string();
    let server = Guarded::start(&super::as_node(&bus));
    server
        .server
        .call(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    let up = || async {
        server
            .server
            .call(&["CLUSTER", "INFO"])
            .text()
            .contains("state:ok")
    };
    eventually("the cluster is up", up).await;
    let url = server.url("rediss-cluster");
    a_lock_works(
        &LockClient::builder()
            .tls(server.tls_of_a_friend())
            .connect(&url)
            .await
            .unwrap(),
    )
    .await;
    let nobody = Tls::new()
        .ca_pem(server.servers.pem())
        .server_name("redis.internal");
    let error = LockClient::builder()
        .tls(nobody)
        .connect(&url)
        .await
        .unwrap_err();
    assert!(matches!(error, Error::Connect { .. }), "{error:?}");
}

/// A sentinel that ends with this process, however that ends.
struct Sentinel(Child);

impl Drop for Sentinel {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        self.0.wait().ok();
    }
}

impl Sentinel {
    fn start(watched: &Guarded, port: u16) -> Self {
        let folder = watched.folder.path();
        let mut lines = vec![
            "port 0".to_owned(),
            "bind 127.0.0.1".into(),
            format!("tls-port {port}"),
            "tls-replication yes".into(),
            format!("sentinel monitor my 127.0.0.1 {} 1", watched.port),
        ];
        lines.extend(
            Guarded::tls(&watched.folder, "")
                .chunks(2)
                .map(|setting| setting.join(" ")),
        );
        let file = folder.join("sentinel.conf");
        fs::write(&file, lines.join("\n")).unwrap();
        let program =
            std::env::var("NESTLOCK_SERVER_BIN").unwrap_or_else(|_| "redis-server".into());
        let child = Command::new("/bin/sh")
            .args([
                "-c",
                r#""$0" "$1" --sentinel >/dev/null & read -r end; kill $!; wait"#,
                &program,
            ])
            .arg(file)
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        Self(child)
    }
}

#[tokio::test]
async fn sentinels_see_the_certificate_too() {
    let server = Guarded::start(&[]);
    let port = dead_port();
    let _sentinel = Sentinel::start(&server, port);
    eventually("the sentinel is there", || async {
        std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()
    })
    .await;
    let url = format!("rediss-sentinel://127.0.0.1:{port}/my");
    let client = LockClient::builder()
        .tls(server.tls_of_a_friend())
        .connect(&url)
        .await
        .unwrap();
    a_lock_works(&client).await;
    let nobody = Tls::new()
        .ca_pem(server.servers.pem())
        .server_name("redis.internal");
    let error = LockClient::builder()
        .tls(nobody)
        .connect(&url)
        .await
        .unwrap_err();
    assert!(matches!(error, Error::Connect { .. }), "{error:?}");
}

/// Nothing is sent, and the error contains no secret.
#[tokio::test]
async fn what_cannot_be_used_is_refused_before_anything_is_sent() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    let ca = authority("servers");
    let ([cert, key], [_, other]) = (signed(&ca, &["client"]), signed(&ca, &["client"]));
    let secret = "MC4CAQAwBQYDK2VwBCIEIsecretsecretsecret";
    let broken = format!("-----BEGIN PRIVATE KEY-----\n{secret}\n-----END PRIVATE KEY-----\n");
    let none = || Tls::new().ca_pem(ca.pem());
    for (scheme, tls, advice) in [
        ("rediss", Tls::new().ca_pem("no PEM"), "BEGIN CERTIFICATE"),
        ("rediss", Tls::new().ca_pem(""), "BEGIN CERTIFICATE"),
        // a key is not a certificate
        (
            "rediss",
            Tls::new().ca_pem(key.as_bytes()),
            "BEGIN CERTIFICATE",
        ),
        (
            "rediss",
            none().client_cert_pem("no PEM", key.as_bytes()),
            "BEGIN CERTIFICATE",
        ),
        (
            "rediss",
            none().client_cert_pem(cert.as_bytes(), "no PEM"),
            "BEGIN PRIVATE KEY",
        ),
        (
            "rediss",
            none().client_cert_pem(key.as_bytes(), cert.as_bytes()),
            "BEGIN CERTIFICATE",
        ),
        (
            "rediss",
            none().client_cert_pem(cert.as_bytes(), broken.as_bytes()),
            "the key must be that",
        ),
        (
            "rediss",
            none().client_cert_pem(cert.as_bytes(), other.as_bytes()),
            "the key must be that",
        ),
        (
            "rediss",
            none().server_name("redis.internal:6379"),
            "without a port",
        ),
        ("rediss", none().server_name(""), "without a port"),
        ("redis", none(), "use rediss://"),
        ("redis-cluster", none(), "rediss-cluster://"),
        ("redis-sentinel", none(), "rediss-sentinel://"),
        (
            "rediss-cluster",
            none().server_name("a b"),
            "without a port",
        ),
        (
            "rediss-sentinel",
            none().server_name("a b"),
            "without a port",
        ),
    ] {
        let builder = LockClient::builder().tls(tls.clone());
        let shown = format!("{tls:?} {builder:?}");
        let error = builder.connect(format!("{scheme}://{at}/my")).await;
        // `my` is a service; the URL of a server has a database there
        let error = match error {
            Err(Error::InvalidConfig { .. }) if scheme.ends_with("sentinel") => error.unwrap_err(),
            _ => LockClient::builder()
                .tls(tls)
                .connect(format!("{scheme}://{at}"))
                .await
                .unwrap_err(),
        };
        assert!(
            matches!(&error, Error::InvalidConfig { reason, .. } if reason.contains(advice)),
            "{scheme}, {advice}: {error:?}"
        );
        for text in [shown, format!("{error} {error:?}")] {
            let secrets = [&key, &other].map(|pem| pem.lines().nth(1).unwrap());
            assert!(
                ![secret, secrets[0], secrets[1]]
                    .iter()
                    .any(|secret| text.contains(secret)),
                "{text}"
            );
        }
    }
    let knock = tokio::time::timeout(Duration::from_millis(100), listener.accept()).await;
    assert!(knock.is_err(), "{knock:?}");
}

/// A reconnect uses the certificate as well.
#[tokio::test]
async fn a_connection_that_is_lost_is_made_again_with_the_certificate() {
    let server = Guarded::start(&[]);
    let client = LockClient::builder()
        .tls(server.tls_of_a_friend())
        .connect(server.url("rediss"))
        .await
        .unwrap();
    a_lock_works(&client).await;
    server
        .server
        .call(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    let guard = client
        .mutex("l")
        .unwrap()
        .try_lock_for(Duration::from_secs(20))
        .await;
    match guard {
        Ok(Some(guard)) => guard.unlock().await.unwrap(),
        Err(Error::Unconfirmed { source, .. }) => {
            assert_eq!(source.kind(), StoreErrorKind::Disconnected);
        }
        other => panic!("{other:?}"),
    }
    a_lock_works(&client).await;
}
