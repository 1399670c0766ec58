//! The way to the server.

use std::{ffi::OsString, fs, path::PathBuf, time::Duration};

use nestlock::{LockClient, LockClientBuilder};

use crate::{
    Failure,
    args::{Server, Unusable},
};

/// What is asked of a server that one knows to be there.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

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
