//! Configurations of fred's: the name that a server's certificate must have, and the trusted
//! authorities.

use std::{net::IpAddr, sync::Arc, time::Duration};

use futures::future::join_all;
use nestlock::{
    Error, LockClient, StoreErrorKind,
    fred::types::config::{
        ClusterDiscoveryPolicy, Config as FredConfig, HostMapping, Server as FredServer,
        ServerConfig, TlsConfig, TlsConnector as FredConnector, TlsHostMapping,
    },
};
use nestlock_wire::{ConnectionSettings, Dialer, Link, Pace, ServerSettings};
use tempfile::TempDir;
use tokio::runtime::Handle;
use tokio_rustls::{
    TlsConnector,
    rustls::{
        ClientConfig, RootCertStore,
        crypto::ring::default_provider,
        pki_types::{CertificateDer, pem::PemObject},
    },
};

use super::certificates::{Authority, authority, dead_port, signed};
use crate::support::{Server, WIRES, eventually};

/// A server with TLS.
struct Serving {
    server: Server,
    port: u16,
    _folder: tempfile::TempDir,
}

/// Starts a server whose certificate has these names.
fn serving(by: &Authority, names: &[&str], args: &[&str]) -> Serving {
    let [cert, key] = signed(by, names);
    let (server, port, folder) = super::serve([&cert, &key, &by.pem()], args);
    Serving {
        server,
        port,
        _folder: folder,
    }
}

/// Starts a cluster of one node, which announces its address as 127.0.0.1.
async fn cluster(by: &Authority, names: &[&str], args: &[&str]) -> Serving {
    let bus = dead_port().to_string();
    let mut words = super::as_node(&bus).to_vec();
    words.extend(["--cluster-announce-ip", "127.0.0.1"]);
    words.extend(args);
    let node = serving(by, names, &words);
    let mut admin = node.server.wire();
    admin
        .call(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"])
        .unwrap();
    eventually("it serves", || async {
        let info = node.server.wire().call(&["CLUSTER", "INFO"]).unwrap();
        info.text().contains("cluster_state:ok")
    })
    .await;
    node
}

/// Returns a connector that trusts this authority, or none.
fn connector(by: Option<&Authority>) -> TlsConnector {
    let mut roots = RootCertStore::empty();
    if let Some(by) = by {
        roots
            .add(CertificateDer::from_pem_slice(by.pem().as_bytes()).unwrap())
            .unwrap();
    }
    let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    TlsConnector::from(Arc::new(config))
}

/// The settings are made from fred's configuration; where both have a connector, that of
/// `settings.tls` counts.
#[tokio::test]
async fn a_replaced_connector_counts_on_either_wire() {
    let by = authority("servers");
    let server = serving(&by, &["localhost"], &[]);
    for &wire in WIRES {
        for (freds, ours) in [(Some(&by), None), (None, Some(&by))] {
            let url = format!("redis://localhost:{}", server.port);
            let mut config = FredConfig::from_url(&url).unwrap();
            config.tls = Some(FredConnector::Rustls(connector(freds)).into());
            let mut settings = ServerSettings::from(config);
            settings.tls.as_mut().unwrap().connector = connector(ours);
            let mut dial = Dialer::new(ConnectionSettings::new(settings, Handle::current()));
            dial.wire = wire;
            let link = Link::connect(dial, &Arc::new(Pace::new())).await;
            if let Ok(link) = &link {
                link.abandon();
            }
            let refused = link.map(drop).map_err(|error| error.kind()).err();
            let expected = ours.is_none().then_some(StoreErrorKind::Tls);
            assert_eq!(refused, expected, "{wire:?}");
        }
    }
}

/// Maps every address to the same name.
#[derive(Debug)]
struct Named(&'static str);

impl HostMapping for Named {
    fn map(&self, _: &IpAddr, _: &str) -> Option<String> {
        Some(self.0.into())
    }
}

/// Connects to a cluster whose seed is `host`, with `name` for its certificate. Asserts that it
/// fails with this error, or succeeds if there is none.
async fn connects(
    by: &Authority,
    node: &Serving,
    (host, name): (&str, Option<&str>),
    hostnames: TlsHostMapping,
    refusal: Option<StoreErrorKind>,
) {
    let said = format!("{host} {name:?} {hostnames:?}");
    let seed = FredServer {
        tls_server_name: name.map(Into::into),
        ..FredServer::new(host, node.port)
    };
    let config = FredConfig {
        server: ServerConfig::Clustered {
            hosts: vec![seed],
            policy: ClusterDiscoveryPolicy::default(),
        },
        tls: Some(TlsConfig {
            connector: FredConnector::Rustls(connector(Some(by))),
            hostnames,
        }),
        ..FredConfig::default()
    };
    let builder = LockClient::builder().connect_timeout(Duration::from_secs(3));
    let found = match builder.connect_to(config).await {
        Ok(client) => {
            let guard = client.mutex("l").unwrap().lock().await.unwrap();
            guard.unlock().await.unwrap();
            None
        }
        Err(Error::Connect { source, .. }) => Some(source.kind()),
        Err(other) => panic!("{said}: {other:?}"),
    };
    assert_eq!(found, refusal, "{said}");
}

/// A refusal at the seed is a TLS error; one at an address that the cluster announces says so in
/// its text.
#[tokio::test]
async fn a_clusters_addresses_have_the_names_of_a_mapping() {
    use TlsHostMapping as M;
    let by = authority("servers");
    let custom = |name| M::Custom(Arc::new(Named(name)));
    let (at_the_seed, later) = (Some(StoreErrorKind::Tls), Some(StoreErrorKind::Unavailable));
    let local = &cluster(&by, &["localhost"], &[]).await;
    let both = &cluster(&by, &["localhost", "127.0.0.1"], &[]).await;
    let internal = &cluster(&by, &["redis.internal"], &[]).await;
    let (seed, named) = (("localhost", None), Some("redis.internal"));
    let cases = [
        (local, seed, M::None, later),
        (local, seed, M::DefaultHost, None),
        (local, seed, custom("localhost"), None),
        (local, seed, custom("redis.internal"), later),
        (both, seed, M::None, None),
        (both, seed, custom("redis.internal"), later),
        (internal, ("localhost", named), M::None, later),
        (
            internal,
            ("localhost", named),
            custom("redis.internal"),
            None,
        ),
        // a server's own name comes first
        (internal, ("127.0.0.1", named), custom("other"), None),
        (
            internal,
            ("127.0.0.1", Some("other")),
            custom("redis.internal"),
            at_the_seed,
        ),
    ];
    let each = |(node, seed, names, refusal)| connects(&by, node, seed, names, refusal);
    join_all(cases.into_iter().map(each)).await;
}

/// A node that announces a host name in addition to its address has a certificate for that name.
#[tokio::test]
async fn an_announced_host_name_is_that_of_the_certificate() {
    use TlsHostMapping as M;
    let by = authority("servers");
    let announcing = async |names: &[&str], name| {
        cluster(&by, names, &["--cluster-announce-hostname", name]).await
    };
    let right = &announcing(&["localhost"], "localhost").await;
    let wrong = &announcing(&["localhost", "127.0.0.1"], "redis.internal").await;
    let internal = &announcing(&["redis.internal"], "localhost").await;
    let other = M::Custom(Arc::new(Named("other")));
    let (seed, later) = (("localhost", None), Some(StoreErrorKind::Unavailable));
    let cases = [
        (right, seed, M::None, None),
        (right, seed, other, None),
        (wrong, seed, M::None, later),
        // a server's own name comes first
        (
            internal,
            ("127.0.0.1", Some("redis.internal")),
            M::None,
            None,
        ),
    ];
    let each = |(node, seed, names, refusal)| connects(&by, node, seed, names, refusal);
    join_all(cases.into_iter().map(each)).await;
}

/// Gives a running node a certificate for these names, and another host name to announce.
fn rename(node: &Serving, by: &Authority, names: &[&str], name: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let paths = ["cert.pem", "key.pem"].map(|file| folder.path().join(file));
    for (path, text) in paths.iter().zip(signed(by, names)) {
        std::fs::write(path, text).unwrap();
    }
    let [cert, key] = paths.each_ref().map(|path| path.to_str().unwrap());
    let words = ["CONFIG", "SET", "tls-cert-file", cert, "tls-key-file", key];
    let words = [&words[..], &["cluster-announce-hostname", name]].concat();
    assert_eq!(node.server.wire().call(&words).unwrap().text(), "OK");
    folder
}

/// The seeds are verified by their own addresses, so the new names are learned from them.
#[tokio::test]
async fn an_announced_host_name_may_change() {
    let by = authority("servers");
    for (names, name) in [
        (&["127.0.0.1", "two.internal"][..], "two.internal"),
        (&["127.0.0.1"], ""),
    ] {
        let announced = ["--cluster-announce-hostname", "one.internal"];
        let node = cluster(&by, &["127.0.0.1", "one.internal"], &announced).await;
        let config = FredConfig {
            server: ServerConfig::Clustered {
                hosts: vec![FredServer::new("127.0.0.1", node.port)],
                policy: ClusterDiscoveryPolicy::default(),
            },
            tls: Some(TlsConfig {
                connector: FredConnector::Rustls(connector(Some(&by))),
                hostnames: TlsHostMapping::None,
            }),
            ..FredConfig::default()
        };
        let client = LockClient::builder().connect_to(config).await.unwrap();
        let lock = client.mutex("l").unwrap();
        lock.lock().await.unwrap().unlock().await.unwrap();
        let _folder = rename(&node, &by, names, name);
        let kill = ["CLIENT", "KILL", "TYPE", "normal"];
        node.server.wire().call(&kill).unwrap();
        eventually("it knows the new name", || async {
            let guard = lock.try_lock_for(Duration::from_secs(5)).await;
            matches!(guard, Ok(Some(_)))
        })
        .await;
    }
}
