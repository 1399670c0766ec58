//! Clients that connect by a configuration of fred's in place of a URL.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use nestlock::{
    Endpoint, Error, LockClient, StoreErrorKind, Tuning,
    fred::{
        error::Error as FredError,
        types::config::{
            Config as FredConfig, CredentialProvider, Server as FredServer, ServerConfig,
        },
    },
};
#[cfg(feature = "rustls")]
use nestlock::{Tls, fred::types::config::TlsConnector};

#[cfg(feature = "rustls")]
use tokio_rustls::rustls::{
    ClientConfig, RootCertStore,
    crypto::ring::default_provider,
    pki_types::{CertificateDer, pem::PemObject},
};

#[cfg(feature = "rustls")]
use crate::tls::{self, certificates};
use crate::{
    connect_errors::{QUOTES, assert_quotes_none, responder},
    sentinel::{call, start},
    support::{Server, WIRES, within},
};

/// The most that a loaded machine may add to any limit.
const SLACK: Duration = Duration::from_secs(3);

/// Returns the password, or hangs at the next call if `hangs` is set.
#[derive(Debug, Clone, Default)]
struct HangingProvider {
    hangs: Arc<AtomicBool>,
    hung: Arc<AtomicU32>,
}

#[async_trait::async_trait]
impl CredentialProvider for HangingProvider {
    async fn fetch(
        &self,
        _: Option<&FredServer>,
    ) -> Result<(Option<String>, Option<String>), FredError> {
        if self.hangs.swap(false, Ordering::AcqRel) {
            self.hung.fetch_add(1, Ordering::AcqRel);
            std::future::pending::<()>().await;
        }
        Ok((Some("default".into()), Some("pw".into())))
    }
}

/// A credential provider that hangs once, as a token service may, costs one attempt to connect.
/// That fits into the lease, so the holder keeps its lock.
#[tokio::test]
async fn a_credential_provider_that_hangs_once_costs_no_lease() {
    for &wire in WIRES {
        let server = Server::start_with(&["--requirepass", "pw"]);
        let provider = HangingProvider::default();
        let mut config = FredConfig::from_url(&format!("redis://{}", server.addr())).unwrap();
        config.credential_provider = Some(Arc::new(provider.clone()));
        let builder = || {
            LockClient::builder()
                .tuning(Tuning {
                    wire,
                    ..Tuning::default()
                })
                .watchdog_timeout(Duration::from_secs(9))
        };
        let client = builder().connect_to(config.clone()).await.unwrap();
        let guard = client.mutex("held").unwrap().lock().await.unwrap();
        // the first call serves the connections of its next 5 s
        tokio::time::sleep(Duration::from_millis(5_200)).await;
        provider.hangs.store(true, Ordering::Release);
        let mut admin = server.wire();
        admin.call(&["AUTH", "pw"]).unwrap();
        admin
            .call(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"])
            .unwrap();
        within(SLACK, "it hangs", || async {
            provider.hung.load(Ordering::Acquire) == 1
        })
        .await;
        let (since, lock) = (Instant::now(), client.mutex("other").unwrap());
        let other = lock
            .try_lock_for(Duration::from_secs(20))
            .await
            .unwrap()
            .expect("no client has it");
        let took = since.elapsed();
        assert!(took < Duration::from_secs(3) + SLACK, "{wire:?}: {took:?}");
        assert!(!guard.is_lost(), "{wire:?}");
        other.unlock().await.unwrap();
        guard.unlock().await.unwrap();
        // at connect, another call is made as well
        provider.hangs.store(true, Ordering::Release);
        builder().connect_to(config.clone()).await.unwrap();
        // a provider that always hangs may take the whole connect timeout
        config.credential_provider = Some(Arc::new(DeafProvider));
        let (since, limit) = (Instant::now(), Duration::from_millis(500));
        let error = builder()
            .connect_timeout(limit)
            .connect_to(config)
            .await
            .unwrap_err();
        let Error::Connect { source, .. } = &error else {
            panic!("{wire:?}: {error:?}")
        };
        assert!(
            source.kind() == StoreErrorKind::Timeout && since.elapsed() < limit + SLACK,
            "{wire:?}: {error:?}"
        );
    }
}

/// Never returns.
#[derive(Debug)]
struct DeafProvider;

#[async_trait::async_trait]
impl CredentialProvider for DeafProvider {
    async fn fetch(
        &self,
        _: Option<&FredServer>,
    ) -> Result<(Option<String>, Option<String>), FredError> {
        std::future::pending().await
    }
}

/// Returns the password, and wants to be called again each 200 ms.
#[derive(Debug, Default)]
struct RefreshingProvider(AtomicU32);

#[async_trait::async_trait]
impl CredentialProvider for RefreshingProvider {
    async fn fetch(
        &self,
        _: Option<&FredServer>,
    ) -> Result<(Option<String>, Option<String>), FredError> {
        self.0.fetch_add(1, Ordering::AcqRel);
        Ok((Some("default".into()), Some("pw".into())))
    }

    fn refresh_interval(&self) -> Option<Duration> {
        Some(Duration::from_millis(200))
    }
}

/// Blocks its thread until it is told that it is over.
#[derive(Debug, Default)]
struct BlockingProvider {
    calls: AtomicU32,
    is_over: AtomicBool,
}

#[async_trait::async_trait]
impl CredentialProvider for BlockingProvider {
    async fn fetch(
        &self,
        _: Option<&FredServer>,
    ) -> Result<(Option<String>, Option<String>), FredError> {
        self.calls.fetch_add(1, Ordering::AcqRel);
        while !self.is_over.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok((Some("default".into()), Some("pw".into())))
    }
}

/// Calls that block forever are 16 at most for one client, and count for no other one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_of_one_endpoint_share_no_calls() {
    let server = Server::start_with(&["--requirepass", "pw"]);
    let provider = Arc::new(BlockingProvider::default());
    let mut config = FredConfig::from_url(&format!("redis://{}", server.addr())).unwrap();
    config.credential_provider = Some(Arc::clone(&provider) as _);
    let endpoint = Endpoint::from(config);
    let more = async {
        while provider.calls.load(Ordering::Acquire) <= 16 {
            let client = LockClient::builder().connect_timeout(Duration::from_millis(400));
            client.connect_to(endpoint.clone()).await.unwrap_err();
        }
    };
    let more = tokio::time::timeout(Duration::from_secs(20), more).await;
    provider.is_over.store(true, Ordering::Release);
    assert!(more.is_ok(), "the clients share the limit");
}

#[tokio::test]
async fn a_provider_of_freds_is_called_at_its_interval() {
    for &wire in WIRES {
        let server = Server::start_with(&["--requirepass", "pw"]);
        let provider = Arc::new(RefreshingProvider::default());
        let mut config = FredConfig::from_url(&format!("redis://{}", server.addr())).unwrap();
        config.credential_provider = Some(provider.clone());
        let builder = LockClient::builder().tuning(Tuning {
            wire,
            ..Tuning::default()
        });
        let client = builder.connect_to(config).await.unwrap();
        let guard = client.mutex("l").unwrap().lock().await.unwrap();
        let before = provider.0.load(Ordering::Acquire);
        within(SLACK, "10 calls", || async {
            provider.0.load(Ordering::Acquire) >= before + 10
        })
        .await;
        guard.unlock().await.unwrap();
    }
}

/// Returns a user and a password.
#[derive(Debug)]
struct Provider;

#[async_trait::async_trait]
impl CredentialProvider for Provider {
    async fn fetch(
        &self,
        _: Option<&FredServer>,
    ) -> Result<(Option<String>, Option<String>), FredError> {
        Ok((Some("u".into()), Some("s3cret".into())))
    }
}

/// No password of a provider shows, whatever a proxy replies to the login.
#[tokio::test]
async fn a_proxy_that_quotes_a_provided_login_shows_no_password() {
    for (answer, kind, words) in QUOTES {
        let url = format!("redis://127.0.0.1:{}", responder(answer));
        for &wire in WIRES {
            let mut config = FredConfig::from_url(&url).unwrap();
            config.credential_provider = Some(Arc::new(Provider));
            let builder = LockClient::builder().tuning(Tuning {
                wire,
                ..Tuning::default()
            });
            let error = builder.connect_to(config).await.unwrap_err();
            let words = match kind {
                StoreErrorKind::Auth => "does each server have this user?",
                _ => words,
            };
            assert_quotes_none(&error, kind, words);
        }
    }
}

#[test]
fn an_endpoint_shows_no_password() {
    let config = FredConfig::from_url("redis://:s3cret@127.0.0.1:1").unwrap();
    let endpoint = Endpoint::from(config);
    let text = format!("{endpoint:?} {endpoint:#?}");
    assert!(!text.contains("s3cret"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_configuration_of_freds_that_names_sentinels_works() {
    let group = start(0, 1);
    let sentinel = group.sentinels()[0].addr();
    assert!(!call(sentinel, &["ACL", "SETUSER", "default", "resetpass", ">pw"]).is_error());
    let mut server = ServerConfig::new_sentinel(vec![("127.0.0.1", sentinel.port())], "mymaster");
    let connect = async |server: &ServerConfig| {
        let config = FredConfig {
            server: server.clone(),
            ..FredConfig::default()
        };
        LockClient::builder().connect_to(config).await
    };
    assert!(matches!(connect(&server).await, Err(Error::Connect { .. })));
    let ServerConfig::Sentinel { password, .. } = &mut server else {
        panic!()
    };
    *password = Some("pw".into());
    let client = connect(&server).await.unwrap();
    client
        .mutex("l")
        .unwrap()
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
}

/// Options with TLS and a configuration of fred's with TLS contradict each other, so they are
/// refused.
#[cfg(feature = "rustls")]
#[tokio::test]
async fn a_configuration_of_freds_with_tls_is_not_overruled() {
    let server = tls::start();
    let tls = || Tls::new().ca_pem(certificates::authority("others").pem());
    let error = LockClient::builder()
        .tls(tls())
        .connect_to(server.config())
        .await
        .unwrap_err();
    assert!(
        matches!(&error, Error::InvalidConfig { reason, .. } if reason.contains("leave out `tls`")),
        "{error:?}"
    );
    assert!(
        LockClient::builder()
            .connect_to(server.config())
            .await
            .is_ok()
    );
}

/// Returns a configuration with a connector of one's own, which trusts these authorities.
#[cfg(feature = "rustls")]
fn trusting(server: &tls::TlsServer, authority: Option<&str>) -> FredConfig {
    let mut roots = RootCertStore::empty();
    if let Some(pem) = authority {
        roots
            .add(CertificateDer::from_pem_slice(pem.as_bytes()).unwrap())
            .unwrap();
    }
    let connector = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let mut config = FredConfig::from_url(&server.url().replace("rediss", "redis")).unwrap();
    config.tls = Some(TlsConnector::from(connector).into());
    config
}

#[cfg(feature = "rustls")]
#[tokio::test]
async fn a_connector_of_ones_own_says_which_authority_to_trust() {
    let server = tls::start();
    for &wire in WIRES {
        let connect = async |config| {
            LockClient::builder()
                .tuning(Tuning {
                    wire,
                    ..Tuning::default()
                })
                .connect_to(config)
                .await
        };
        let refused = connect(trusting(&server, None)).await;
        assert!(matches!(refused, Err(Error::Connect { .. })), "{refused:?}");
        let trusted = connect(trusting(&server, Some(&server.authority))).await;
        let lock = trusted.unwrap().reentrant_lock("l").unwrap();
        lock.lock().await.unwrap().unlock().await.unwrap();
    }
}
