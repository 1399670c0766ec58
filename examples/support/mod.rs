//! A server for the examples: the one in `NESTLOCK_URL`, or an embedded one that ends with the
//! example.

use std::{
    env::{self, VarError},
    error::Error,
};

use nestlock_embedded::EmbeddedServer;

/// A server. An embedded one ends when this is dropped.
pub(crate) struct Server {
    url: String,
    _ours: Option<EmbeddedServer>,
}

impl Server {
    pub(crate) fn url(&self) -> &str {
        &self.url
    }
}

/// Uses `NESTLOCK_URL` if it is set, and only that; otherwise starts an embedded server.
pub(crate) fn server() -> Result<Server, Box<dyn Error>> {
    match env::var("NESTLOCK_URL") {
        Ok(url) => Ok(Server { url, _ours: None }),
        Err(VarError::NotPresent) => {
            let server = EmbeddedServer::start()?;
            let url = server.url();
            println!(
                "embedded server at {url}: locks are shared only within this process, and with child processes that get \
                 this URL; for a real server set NESTLOCK_URL"
            );
            Ok(Server {
                url,
                _ours: Some(server),
            })
        }
        Err(unreadable) => Err(format!("NESTLOCK_URL: {unreadable}").into()),
    }
}
