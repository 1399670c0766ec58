//! Configurations of fred's: which name a server's certificate must have, and whom to trust.

use std::{fs, sync::Arc};

use nestlock::{
    StoreErrorKind,
    fred::types::config::{Config as FredConfig, TlsConnector as FredConnector},
};
use nestlock_wire::{ConnectionSettings, Dialer, Link, Pace, ServerSettings};
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
use crate::support::{Server, WIRES};

/// A server by TLS.
struct Serving {
    _server: Server,
    port: u16,
    _folder: tempfile::TempDir,
}

/// Starts a server whose certificate has these names.
fn serving(by: &Authority, names: &[&str], args: &[&str]) -> Serving {
    let folder = tempfile::tempdir().unwrap();
    let [cert, key] = signed(by, names);
    for (name, pem) in [("cert", cert), ("key", key), ("ca", by.pem())] {
        fs::write(folder.path().join(name), pem).unwrap();
    }
    let file = |name: &str| folder.path().join(name).display().to_string();
    let (cert, key, ca) = (file("cert"), file("key"), file("ca"));
    let port = dead_port();
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
    Serving {
        _server: Server::start_with(&words),
        port,
        _folder: folder,
    }
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

/// Of `settings.tls` and of fred's configuration, which they were made of, `settings.tls` counts.
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
