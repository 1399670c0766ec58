//! The way to the server.

use std::{ffi::OsString, fs, net::Ipv4Addr, path::PathBuf, time::Duration};

use nestlock::{LockClient, LockClientBuilder};

use crate::{
    Failure,
    args::{Server, Unusable},
};

/// What is asked of a server that one knows to be there.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

impl Server {
    pub(crate) fn url(&self) -> Result<String, Failure> {
        // what is said beats what is around
        let around = self.url.is_none() && self.url_file.is_none();
        let of_variable = |name: &str| std::env::var_os(name).filter(|value| around && !value.is_empty());
        let url = self.url.clone().map(OsString::from).or_else(|| of_variable("NESTLOCK_URL"));
        let file = self.url_file.clone().or_else(|| of_variable("NESTLOCK_URL_FILE").map(PathBuf::from));
        if let Some(url) = url {
            return url.into_string().map_err(|_| Unusable("the URL is no text".to_owned()).into());
        }
        if let Some(file) = &file {
            let text = fs::read_to_string(file).map_err(|error| {
                Unusable(format!("the file {} of --url-file cannot be read: {error}", file.display()))
            })?;
            return Ok(text.lines().next().unwrap_or_default().trim().to_owned());
        }
        Ok("redis://127.0.0.1:6379".to_owned())
    }

    /// Where it is, without user and password.
    pub(crate) fn address(&self) -> Result<String, Failure> {
        let url = self.url()?;
        let rest = url.split_once("://").map_or(&*url, |(_, rest)| rest);
        Ok(rest.rsplit_once('@').map_or(rest, |(_, address)| address).to_owned())
    }

    /// Whether it is on this machine.
    pub(crate) fn is_near(&self) -> Result<bool, Failure> {
        let address = self.address()?;
        let host = address.split(['/', '?']).next().unwrap_or_default();
        let host = host.rsplit_once(':').map_or(host, |(host, _)| host);
        // the path of a socket
        Ok(matches!(host, "" | "localhost" | "[::1]") || host.parse().is_ok_and(|host: Ipv4Addr| host.is_loopback()))
    }

    pub(crate) fn build(&self) -> LockClientBuilder {
        LockClient::builder().name_prefix(&self.prefix).connect_timeout(CONNECT_TIMEOUT)
    }

    /// Connects. `lease`: how long a hold lasts that is not renewed.
    pub(crate) async fn connect(&self, lease: Option<Duration>) -> Result<LockClient, Failure> {
        self.connect_for(lease, "nestlock".into()).await
    }

    /// The same for this program, as others are told.
    pub(crate) async fn connect_for(&self, lease: Option<Duration>, program: String) -> Result<LockClient, Failure> {
        let mut builder = self.build().application(program);
        if let Some(lease) = lease {
            builder = builder.watchdog_timeout(lease);
        }
        Ok(builder.connect(self.url()?).await?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_near_by_its_host_and_told_without_a_password() {
        let near = |url: &str| {
            let server = Server { url: Some(url.into()), url_file: None, prefix: String::new() };
            assert!(!server.address().unwrap().contains("secret"));
            server.is_near().unwrap()
        };
        for url in ["redis://127.0.0.2:1", "redis://u:secret@localhost", "rediss://[::1]:6379/1", "redis+unix:///a/b"] {
            assert!(near(url), "{url}");
        }
        for url in ["redis://localhost.example.com:1", "redis://localhost:secret@db", "redis://10.0.0.127:1/127.0.0.1"]
        {
            assert!(!near(url), "{url}");
        }
    }
}
