//! What the benches share: a server, a bare fred client beside ours, and figures as ratios of one run.
#![allow(dead_code, unreachable_pub)]

use std::time::Duration;

use fred::{
    clients::Client,
    interfaces::ClientLike,
    types::{Builder, config::Config},
};
use nestlock_embedded::SpawnedServer;

/// A real server: the figures are about nothing else.
pub struct Server {
    url: String,
    _ours: Option<SpawnedServer>,
}

impl Server {
    pub fn url(&self) -> &str {
        &self.url
    }
}

/// The server that `NESTLOCK_URL` names, else a private one.
pub fn server() -> Server {
    if let Some(url) = std::env::var_os("NESTLOCK_URL") {
        return Server { url: url.into_string().expect("a URL"), _ours: None };
    }
    let server = SpawnedServer::start().unwrap_or_else(|error| panic!("{error}"));
    Server { url: server.url(), _ours: Some(server) }
}

/// fred as one would use it without nestlock, driven by the caller's runtime.
pub async fn bare(url: &str) -> Client {
    let mut builder = Builder::from_config(Config::from_url(url).expect("a URL"));
    builder.with_connection_config(|connection| {
        connection.max_command_attempts = 1;
        connection.tcp.nodelay = Some(true);
    });
    builder.with_performance_config(|performance| performance.default_command_timeout = Duration::from_secs(3));
    let client = builder.build().expect("a client");
    client.init().await.expect("a connection");
    client
}

pub fn quantile(samples: &mut [f64], q: f64) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[((samples.len() - 1) as f64 * q).round() as usize]
}

pub fn median(samples: &mut [f64]) -> f64 {
    quantile(samples, 0.5)
}

/// Prints one figure beside its bound.
pub fn report(what: &str, figure: f64, bound: &str) {
    println!("{what:<78} {figure:>9.2}   {bound}");
}

/// Resident memory of this process, in bytes.
pub fn resident() -> f64 {
    let status = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages: f64 = status.split(' ').nth(1).expect("a second field").parse().expect("a number");
    pages * 4096.0
}
