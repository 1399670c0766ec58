//! The errors of a TLS connect: the rows about it in the table of src/guide/errors.md.

use std::time::Duration;

use nestlock::{Error, LockClient, LockClientBuilder, StoreErrorKind, Tls, Tuning, Wire};
use rcgen::{CertificateParams, KeyPair};

use super::certificates::{Guarded, authority, signed};
use crate::{
    connect_errors::{assert_told, builder},
    support::{Server, WIRES},
};

/// A self-signed X.509 v1 certificate for `localhost`, and its key, from `openssl x509 -req` of
/// version 3.0.
const V1: [&str; 2] = [
    "\
-----BEGIN CERTIFICATE-----
MIIBIzCBywIUey95yW5Z7uedmSJqv76IfsSXp4UwCgYIKoZIzj0EAwIwFDESMBAG
A1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyNjE4MDUxNVoYDzIxMjYxMTAyMTgwNTE1
WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNC
AASwbv3TfRz1L196U0mYEtu8Iod6YhSt/Yh1on2GRcXWcPftP5XH9L4aNc0HmV5s
yPRSc3QwknE92phbj98hlUfLMAoGCCqGSM49BAMCA0cAMEQCIHK2I6cCnl4YnIRf
ahSIH0nYKzemfIUFTE3Usui72DQzAiArubPBTR4hcSvM08B0doMAEgDylIlUun2B
cSksQt4qIw==
-----END CERTIFICATE-----
",
    "\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgS31Ayi0kJPUrJw1s
GN+7u68l3ng9pBSWV8/ken8GarKhRANCAASwbv3TfRz1L196U0mYEtu8Iod6YhSt
/Yh1on2GRcXWcPftP5XH9L4aNc0HmV5syPRSc3QwknE92phbj98hlUfL
-----END PRIVATE KEY-----
",
];

/// Starts a server with this certificate and key.
fn serving([cert, key]: [&str; 2]) -> (Server, u16, tempfile::TempDir) {
    super::serve([cert, key, cert], &[])
}

async fn refused(builder: LockClientBuilder, port: u16) -> Error {
    builder
        .connect(format!("rediss://localhost:{port}"))
        .await
        .unwrap_err()
}

#[tokio::test]
async fn a_certificate_that_is_not_believed_is_final() {
    let ca = authority("servers");
    let [cert, key] = signed(&ca, &["localhost"]);
    let (_server, port, _folder) = serving([&cert, &key]);
    let mut expired = CertificateParams::new(["localhost".to_owned()]).unwrap();
    expired.not_after = rcgen::date_time_ymd(2020, 1, 1);
    let old = KeyPair::generate().unwrap();
    let expired = expired.signed_by(&old, &ca).unwrap().pem();
    let (_server, of_old, _folder) = serving([&expired, &old.serialize_pem()]);
    let (_server, of_v1, _folder) = serving(V1);
    for &wire in WIRES {
        let trusting = |pem: &str| builder(wire).tls(Tls::new().ca_pem(pem));
        let stranger = authority("strangers").pem();
        let (of_ca, other) = (
            trusting(&ca.pem()),
            Tls::new().ca_pem(ca.pem()).server_name("other.internal"),
        );
        for (error, advice) in [
            (
                refused(trusting(&stranger), port).await,
                "`Tls::ca_pem`, or --tls-ca",
            ),
            (
                refused(builder(wire).tls(other), port).await,
                "`Tls::server_name`, or --tls-server-name",
            ),
            (
                refused(of_ca.clone(), of_old).await,
                "renew the server's certificate",
            ),
            (refused(of_ca, of_v1).await, "it is X.509 v1"),
        ] {
            assert_told(&error, StoreErrorKind::Tls, false, advice);
        }
        trusting(&ca.pem())
            .connect(format!("rediss://localhost:{port}"))
            .await
            .unwrap();
    }
}

/// The server closes the connection at once, so its alert may be lost; the error is transient then.
#[tokio::test]
async fn a_missing_client_certificate_is_named() {
    let server = Guarded::start(&[]);
    let [cert, key] = signed(&authority("strangers"), &["client"]);
    for &wire in WIRES {
        let none = Tls::new()
            .ca_pem(server.servers.pem())
            .server_name("redis.internal");
        for tls in [
            none.clone(),
            none.client_cert_pem(cert.clone(), key.clone()),
        ] {
            let mut told = None;
            for _ in 0..50 {
                let error = refused(builder(wire).tls(tls.clone()), server.port).await;
                if !error.is_transient() {
                    told = Some(error);
                    break;
                }
            }
            assert_told(
                &told.expect("the server's refusal"),
                StoreErrorKind::Tls,
                false,
                "Tls::client_cert_pem",
            );
        }
    }
}

/// The plain port either replies in plain text, or waits for the end of a line that never comes.
#[tokio::test]
async fn tls_to_a_plain_port_is_named() {
    let plain = Server::start();
    let url = format!("rediss://localhost:{}", plain.addr().port());
    for &wire in WIRES {
        for _ in 0..8 {
            let builder = LockClient::builder()
                .tuning(Tuning {
                    wire,
                    ..Tuning::default()
                })
                .connect_timeout(Duration::from_millis(700));
            let error = builder.connect(&url).await.unwrap_err();
            let Error::Connect { source, .. } = &error else {
                panic!("{error:?}")
            };
            let is_final = source.kind() == StoreErrorKind::Tls;
            assert!(
                is_final || source.kind() == StoreErrorKind::Timeout,
                "{error}"
            );
            assert_told(&error, source.kind(), !is_final, "use redis://");
        }
    }
}

#[tokio::test]
async fn plain_text_to_a_port_of_tls_is_named() {
    let ca = authority("servers");
    let [cert, key] = signed(&ca, &["localhost"]);
    let (_server, port, _folder) = serving([&cert, &key]);
    let error = builder(Wire::Own)
        .connect(format!("redis://localhost:{port}"))
        .await
        .unwrap_err();
    assert_told(&error, StoreErrorKind::Unavailable, true, "use rediss://");
}
