//! The address of a server, as errors show it.

use fred::types::config::{Config as FredConfig, ServerConfig};

/// Returns where a configuration leads, without user and password.
pub(crate) fn address(server: &FredConfig) -> String {
    match &server.server {
        ServerConfig::Unix { path } => path.display().to_string(),
        other => {
            let hosts: Vec<String> = other
                .hosts()
                .iter()
                .map(|host| format!("{}:{}", host.host, host.port))
                .collect();
            hosts.join(", ")
        }
    }
}
