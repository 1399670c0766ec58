//! TLS with custom certificates: which CAs to trust, and which client certificate to present.

use std::{fmt, sync::Arc};

use nestlock_wire::TlsSettings;
use rustls_native_certs::load_native_certs;
use tokio_rustls::{
    TlsConnector,
    rustls::{
        ClientConfig, RootCertStore,
        crypto::ring::default_provider,
        pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    },
};

use crate::error::{Error, Result, StoreError, StoreErrorKind};

/// The certificates for TLS connections to servers. See
/// [`LockClientBuilder::tls`](crate::LockClientBuilder::tls).
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use nestlock::{LockClient, Tls};
///
/// let tls = Tls::new()
///     .ca_pem(std::fs::read("ca.pem")?)
///     .client_cert_pem(std::fs::read("client.pem")?, std::fs::read("client-key.pem")?)
///     .server_name("redis.internal");
/// let client = LockClient::builder().tls(tls).connect("rediss://10.0.0.7:6379").await?;
/// # let _ = client; Ok(())
/// # }
/// ```
#[derive(Clone, Default)]
#[must_use]
pub struct Tls {
    /// Empty: the system's CAs.
    authorities: Vec<Vec<u8>>,
    client: Option<ClientCertificate>,
    server_name: Option<String>,
}

/// The client certificate and its key, in PEM.
#[derive(Clone)]
struct ClientCertificate {
    chain: Vec<u8>,
    key: Vec<u8>,
}

impl fmt::Debug for Tls {
    /// Omits certificates and keys.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls")
            .field("authorities", &self.authorities.len())
            .field("has_client_cert", &self.client.is_some())
            .field("server_name", &self.server_name)
            .finish()
    }
}

fn refuse<T>(reason: impl Into<String>) -> Result<T> {
    Err(Error::InvalidConfig {
        reason: reason.into(),
    })
}

impl Tls {
    /// Creates the default settings: the system's CAs, and no client certificate.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds CA certificates, in PEM, one or more per call. A server's certificate must be signed by
    /// one of these CAs; the system's CAs are no longer trusted.
    pub fn ca_pem(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.authorities.push(pem.into());
        self
    }

    /// Sets the client certificate and its private key, both in PEM, for servers that request one
    /// (`tls-auth-clients yes`). `chain` starts with the client's own certificate, followed by
    /// those that lead to a CA that the server trusts. `key` is PKCS#8, PKCS#1 or SEC1, not
    /// encrypted.
    ///
    /// Sentinels receive the same certificate.
    pub fn client_cert_pem(mut self, chain: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>) -> Self {
        self.client = Some(ClientCertificate {
            chain: chain.into(),
            key: key.into(),
        });
        self
    }

    /// Sets the name that each server's certificate must have, whatever its address. Default: the
    /// host in the URL, or the host by which the cluster or the Sentinels name the server. If that
    /// is an IP address, the certificate must have the host name that a cluster's node announces
    /// for it (`cluster-announce-hostname`), or else that IP address.
    pub fn server_name(mut self, name: impl Into<String>) -> Self {
        self.server_name = Some(name.into());
        self
    }

    /// Returns how to speak TLS. No error quotes a certificate or a key.
    pub(super) fn settings(&self) -> Result<TlsSettings> {
        if let Some(name) = self.server_name.as_deref()
            && ServerName::try_from(name).is_err()
        {
            return refuse(format!(
                "Tls::server_name is {name:?}; use a host name or an IP address, without a port"
            ));
        }
        let roots = self.roots()?;
        let builder = match ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
        {
            Ok(builder) => builder.with_root_certificates(roots),
            Err(error) => return refuse(format!("TLS cannot be set up ({error})")),
        };
        let config = match &self.client {
            None => builder.with_no_client_auth(),
            Some(ClientCertificate { chain, key }) => {
                let chain = certificates(chain, "Tls::client_cert_pem")?;
                let Ok(key) = PrivateKeyDer::from_pem_slice(key) else {
                    return refuse(
                        "the key of Tls::client_cert_pem has no readable private key in PEM; it begins with \
                         `-----BEGIN PRIVATE KEY-----`, and is not encrypted",
                    );
                };
                match builder.with_client_auth_cert(chain, key) {
                    Ok(config) => config,
                    Err(error) => {
                        return refuse(format!(
                            "Tls::client_cert_pem cannot be used ({error}); the key must be that of the first certificate"
                        ));
                    }
                }
            }
        };
        Ok(TlsSettings {
            connector: TlsConnector::from(Arc::new(config)),
            server_name: self.server_name.as_deref().map(Arc::from),
        })
    }

    fn roots(&self) -> Result<RootCertStore> {
        let mut roots = RootCertStore::empty();
        for pem in &self.authorities {
            for authority in certificates(pem, "Tls::ca_pem")? {
                if let Err(error) = roots.add(authority) {
                    return refuse(format!(
                        "a certificate of Tls::ca_pem cannot be used ({error})"
                    ));
                }
            }
        }
        if self.authorities.is_empty() {
            let system = load_native_certs();
            roots.add_parsable_certificates(system.certs);
            if roots.is_empty() {
                // transient, unlike a system without CA certificates
                let is_in_need = |error: &String| error.contains("Too many open files");
                if let Some(why) = system
                    .errors
                    .iter()
                    .map(ToString::to_string)
                    .find(is_in_need)
                {
                    let source = StoreError::new(StoreErrorKind::Unavailable, false, why);
                    return Err(Error::Connect {
                        address: "a server by TLS".into(),
                        source,
                    });
                }
                return refuse("the system has no CA certificates; add yours with Tls::ca_pem");
            }
        }
        Ok(roots)
    }
}

fn certificates(pem: &[u8], what: &str) -> Result<Vec<CertificateDer<'static>>> {
    let read: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match read {
        Ok(some) if !some.is_empty() => Ok(some),
        _ => refuse(format!(
            "{what} has no readable certificate in PEM; one begins with `-----BEGIN CERTIFICATE-----`"
        )),
    }
}
