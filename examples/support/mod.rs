//! A server for the examples: the one that `NESTLOCK_URL` names, else an embedded one that ends with the example.

use std::{
    env::{self, VarError},
    error::Error,
};

use nestlock_embedded::EmbeddedServer;

/// A server; if it is ours, it ends when this is dropped.
pub(crate) struct Server {
    url: String,
    _ours: Option<EmbeddedServer>,
}

impl Server {
    pub(crate) fn url(&self) -> &str {
        &self.url
    }
}

/// Uses `NESTLOCK_URL`, and nothing else if it is set; without it, starts an embedded server.
pub(crate) fn server() -> Result<Server, Box<dyn Error>> {
    match env::var("NESTLOCK_URL") {
        Ok(url) => Ok(Server { url, _ours: None }),
        Err(VarError::NotPresent) => {
            let server = EmbeddedServer::start()?;
            let url = server.url();
            println!(
                "embedded server at {url}: locks are shared only within this process, and with processes that it gives \
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
