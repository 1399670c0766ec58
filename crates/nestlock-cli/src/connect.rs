//! Connects to the server: reads the URL and the certificates, and builds the client.

use std::{
    ffi::OsString,
    fs, io,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    time::Duration,
};

use nestlock::{LockClient, LockClientBuilder, Tls, Tuning};
use nix::errno::Errno;

use crate::{
    args::{Certificates, Server},
    failure::{Failure, Unusable},
};

/// How long each acquire waits for replicas. An acquire that too few of them have acknowledged by
/// then is released and retried.
const REPLICAS_TIMEOUT: Duration = Duration::from_secs(1);
/// The connect timeout, for a server that is known to be there.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

impl Server {
    pub(crate) fn url(&self) -> Result<String, Failure> {
        if self.said.get().is_none() {
            let _ = self.said.set(self.read()?);
        }
        Ok(self.said.get().cloned().unwrap_or_default())
    }

    fn read(&self) -> Result<String, Failure> {
        // options take precedence over environment variables
        let around = self.url.is_none() && self.url_file.is_none();
        let of_variable =
            |name: &str| std::env::var_os(name).filter(|value| around && !value.is_empty());
        let url = self
            .url
            .clone()
            .map(OsString::from)
            .or_else(|| of_variable("NESTLOCK_URL"));
        let file = self
            .url_file
            .clone()
            .or_else(|| of_variable("NESTLOCK_URL_FILE").map(PathBuf::from));
        let url = if let Some(url) = url {
            url.into_string()
                .map_err(|_| Unusable("the URL is not valid UTF-8".to_owned()))?
        } else if let Some(file) = &file {
            let text =
                fs::read_to_string(file).map_err(|error| unreadable(file, "--url-file", &error))?;
            text.lines().next().unwrap_or_default().trim().to_owned()
        } else {
            "redis://127.0.0.1:6379".to_owned()
        };
        if url.matches("://").count() > 1 {
            return Err(Unusable(
                "several URLs were given, but nestlock connects to one server, cluster or service: separate its addresses \
                 with commas, as in `redis-cluster://a:6379,b:6379`; only the library supports RedLocks over several servers"
                    .to_owned(),
            )
            .into());
        }
        Ok(url)
    }

    /// Returns the address for display: without user and password, and of several addresses the
    /// first.
    pub(crate) fn address(&self) -> Result<String, Failure> {
        let (_, rest) = self.parts()?;
        let (hosts, path) = rest
            .split_once('/')
            .map_or((&*rest, ""), |(hosts, path)| (hosts, path));
        Ok(match hosts.split(',').collect::<Vec<_>>()[..] {
            [first, _, ..] => {
                let path = if path.is_empty() {
                    String::new()
                } else {
                    format!("/{path}")
                };
                format!("{first} +{}{path}", hosts.matches(',').count())
            }
            _ => rest,
        })
    }

    /// Returns the scheme and the address, without user, password and options.
    fn parts(&self) -> Result<(String, String), Failure> {
        let url = self.url()?;
        // in a URL that the library accepts, `@`, `/` and `?` occur only as separators
        self.build()?.fred_config(&url, None)?;
        let (scheme, rest) = url.split_once("://").unwrap_or(("", &url));
        let rest = rest.split('?').next().unwrap_or_default();
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let hosts = authority
            .rsplit_once('@')
            .map_or(authority, |(_, hosts)| hosts);
        Ok((scheme.to_owned(), format!("{hosts}{path}")))
    }

    /// Returns what the URL says of the servers: whether they are a cluster, and whether the master
    /// has to be discovered.
    pub(crate) fn is_cluster_or_service(&self) -> Result<(bool, bool), Failure> {
        let (scheme, address) = self.parts()?;
        let is_list = address.split('/').next().unwrap_or_default().contains(',');
        let is_cluster = scheme.ends_with("-cluster");
        Ok((
            is_cluster,
            scheme.ends_with("-sentinel") || is_list && !is_cluster,
        ))
    }

    pub(crate) fn build(&self) -> Result<LockClientBuilder, Failure> {
        let builder = LockClient::builder()
            .name_prefix(&self.prefix)
            .connect_timeout(CONNECT_TIMEOUT);
        Ok(match self.tls.read()? {
            Some(tls) => builder.tls(tls),
            None => builder,
        })
    }

    /// Connects for reading only: the user may lack the permission to run scripts.
    pub(crate) async fn connect_to_look(&self) -> Result<LockClient, Failure> {
        Ok(self
            .build()?
            .application("nestlock")
            .tuning(Tuning {
                tries_scripts: false,
                ..Tuning::default()
            })
            .connect(self.url()?)
            .await?)
    }

    /// Connects. `lease`: how long a hold lasts without a renewal.
    pub(crate) async fn connect(&self, lease: Option<Duration>) -> Result<LockClient, Failure> {
        self.connect_for(lease, 0, "nestlock".into()).await
    }

    /// Connects as `program`, the name that other clients see. `replicas`: how many replicas must
    /// have a lock that is acquired.
    pub(crate) async fn connect_for(
        &self,
        lease: Option<Duration>,
        replicas: u32,
        program: String,
    ) -> Result<LockClient, Failure> {
        let mut builder = self.build()?.application(program);
        if replicas > 0 {
            builder = builder.replicas(replicas, REPLICAS_TIMEOUT);
        }
        if let Some(lease) = lease {
            builder = builder.watchdog_timeout(lease);
        }
        Ok(builder.connect(self.url()?).await?)
    }
}

impl Certificates {
    /// Reads the certificates. Returns `None` if no option is set: the system's authorities are
    /// trusted then.
    fn read(&self) -> Result<Option<Tls>, Failure> {
        let file = |option: &str, file: &Path| {
            fs::read(file).map_err(|error| unreadable(file, option, &error))
        };
        // an environment variable may be empty
        let said =
            |path: &Option<PathBuf>| path.clone().filter(|path| !path.as_os_str().is_empty());
        let (mut tls, mut any) = (Tls::new(), false);
        if let Some(ca) = &said(&self.tls_ca) {
            (tls, any) = (tls.ca_pem(file("--tls-ca", ca)?), true);
        }
        match (&said(&self.tls_cert), &said(&self.tls_key)) {
            (Some(cert), Some(key)) => {
                (tls, any) = (
                    tls.client_cert_pem(file("--tls-cert", cert)?, file("--tls-key", key)?),
                    true,
                );
            }
            (None, None) => {}
            _ => {
                return Err(
                    Unusable("--tls-cert and --tls-key must be given together".to_owned()).into(),
                );
            }
        }
        if let Some(name) = self
            .tls_server_name
            .as_ref()
            .filter(|name| !name.is_empty())
        {
            (tls, any) = (tls.server_name(name), true);
        }
        Ok(any.then_some(tls))
    }
}

/// Converts a read error. It is a usage error, unless no file descriptor was left for it.
fn unreadable(file: &Path, option: &str, error: &io::Error) -> Failure {
    let why = format!(
        "the file {} of {option} cannot be read: {error}",
        file.display()
    );
    let is_in_need = error
        .raw_os_error()
        .is_some_and(|code| [Errno::EMFILE as i32, Errno::ENFILE as i32].contains(&code));
    if is_in_need {
        why.into()
    } else {
        Unusable(why).into()
    }
}

/// Returns whether an address or the path of a socket is on this machine.
pub(crate) fn is_near(address: &str) -> bool {
    let host = address.split('/').next().unwrap_or_default();
    let host = host.rsplit_once(':').map_or(host, |(host, _)| host);
    matches!(host, "" | "localhost" | "::1" | "[::1]")
        || host.parse().is_ok_and(|host: Ipv4Addr| host.is_loopback())
}

#[cfg(test)]
mod tests {
    use std::cell::OnceCell;

    use super::*;

    fn server(url: &str) -> Server {
        Server {
            url: Some(url.into()),
            url_file: None,
            said: OnceCell::new(),
            prefix: String::new(),
            tls: Certificates::default(),
        }
    }

    #[test]
    fn a_server_is_near_by_its_host() {
        for address in ["127.0.0.2:1", "localhost", "[::1]:6379/1", "/a/b"] {
            assert!(is_near(address), "{address}");
        }
        for address in ["localhost.example.com:1", "db", "10.0.0.127:1/127.0.0.1"] {
            assert!(!is_near(address), "{address}");
        }
    }

    #[test]
    fn a_server_is_shown_without_a_password() {
        for (url, told) in [
            ("redis://u:secret@localhost", "localhost"),
            ("redis+unix:///a/b", "/a/b"),
            ("redis+unix://u:secret@/a/b?db=3", "/a/b"),
            ("redis://u:secret@h:1/3?wire=own", "h:1/3"),
            (
                "redis-sentinel://:secret@a:1,b,c:3/main/2?sentinelPassword=secret",
                "a:1 +2/main/2",
            ),
            ("redis-cluster://a:1,b:2", "a:1 +1"),
        ] {
            assert_eq!(server(url).address().unwrap(), told);
        }
    }

    /// A URL that could be read in another way is refused, and no part of it is shown as an
    /// address.
    #[test]
    fn a_url_that_is_not_read_whole_has_no_address() {
        for url in [
            "redis://u:12?secret@h",
            "redis://u:12#secret@h",
            "redis://u:12/secret@h",
            "redis://u:secret",
        ] {
            let error = server(url).address().unwrap_err().to_string();
            assert!(!error.contains("secret"), "{url}: {error}");
        }
    }

    #[test]
    fn what_the_servers_are_stands_in_the_url() {
        for (url, said) in [
            ("redis://a:1/3", (false, false)),
            ("redis://u:p,w@a:1", (false, false)),
            ("redis://a,b", (false, true)),
            ("redis-cluster://a", (true, false)),
            ("valkey-cluster://a,b", (true, false)),
            ("redis-sentinel://a/main", (false, true)),
        ] {
            assert_eq!(server(url).is_cluster_or_service().unwrap(), said, "{url}");
        }
        assert!(
            server("redis://a,redis://b")
                .url()
                .unwrap_err()
                .to_string()
                .contains("several URLs")
        );
    }
}
