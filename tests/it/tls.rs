//! TLS: certificates are checked, and nothing falls back to plain text.

use std::{fs, net::TcpListener, sync::Arc, time::Duration};

use fred::{
    rustls::{ClientConfig, RootCertStore, crypto::ring::default_provider, pki_types::CertificateDer},
    types::config::{Config, TlsConnector},
};
use nestlock::{Error, LockClient};

use crate::support::Server;

/// A server with a certificate for `localhost`, and who signed it.
struct TlsServer {
    _server: Server,
    port: u16,
    authority: CertificateDer<'static>,
    _folder: tempfile::TempDir,
}

fn start() -> TlsServer {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).display().to_string();
    let signed = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    fs::write(file("cert.pem"), signed.cert.pem()).unwrap();
    fs::write(file("key.pem"), signed.signing_key.serialize_pem()).unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (cert, key, tls_port) = (file("cert.pem"), file("key.pem"), port.to_string());
    let server = Server::start_with(&[
        "--tls-port",
        &tls_port,
        "--tls-cert-file",
        &cert,
        "--tls-key-file",
        &key,
        "--tls-auth-clients",
        "no",
        "--tls-ca-cert-file",
        &cert,
    ]);
    TlsServer { _server: server, port, authority: signed.cert.der().clone(), _folder: folder }
}

fn trusting(server: &TlsServer, authority: Option<&CertificateDer<'static>>) -> Config {
    let mut roots = RootCertStore::empty();
    if let Some(authority) = authority {
        roots.add(authority.clone()).unwrap();
    }
    let tls = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let mut config = Config::from_url(&format!("redis://localhost:{}", server.port)).unwrap();
    config.tls = Some(TlsConnector::from(tls).into());
    config
}

#[tokio::test]
async fn locks_work_over_tls_with_a_certificate_authority_of_ones_own() {
    let server = start();
    let config = trusting(&server, Some(&server.authority));
    let (a, b) = (LockClient::builder().connect_to(config.clone()).await.unwrap(), LockClient::builder());
    let b = b.connect_to(config).await.unwrap();
    let guard = a.reentrant_lock("l").unwrap().lock().await.unwrap();
    let theirs = b.reentrant_lock("l").unwrap();
    assert!(theirs.try_lock().await.unwrap().is_none());
    let waiter = tokio::spawn(async move { theirs.lock().await.unwrap().unlock().await });
    guard.unlock().await.unwrap();
    waiter.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_certificate_that_nobody_vouches_for_is_refused() {
    let server = start();
    let outcome = LockClient::builder().connect_to(trusting(&server, None)).await;
    assert!(matches!(outcome, Err(Error::Connect { .. })), "{outcome:?}");
    // the system does not vouch for it either
    let outcome = LockClient::connect(format!("rediss://localhost:{}", server.port)).await;
    assert!(matches!(outcome, Err(Error::Connect { .. })), "{outcome:?}");
}

#[tokio::test]
async fn a_server_without_tls_is_never_spoken_to_in_plain_text() {
    let server = Server::start();
    let url = format!("rediss://localhost:{}", server.addr().port());
    let outcome = LockClient::builder().connect_timeout(Duration::from_secs(3)).connect(url).await;
    assert!(matches!(outcome, Err(Error::Connect { .. })), "{outcome:?}");
    assert_eq!(server.command_count("hello"), 0);
}
