//! The credentials of a connection, and what replaces them.

use std::time::Duration;

use crate::{
    clock::Instant,
    credential_source::{CredentialSource, Fetched},
    settings::ConnectionSettings,
};

/// The credentials of a connection, if they expire.
pub(crate) struct Expiring {
    pub(crate) source: CredentialSource,
    pub(crate) settings: ConnectionSettings,
    /// When the provider was called.
    pub(crate) at: Instant,
    pub(crate) refresh_after: Duration,
}

impl Expiring {
    pub(crate) fn new(
        source: &CredentialSource,
        settings: &ConnectionSettings,
        fetched: &Fetched,
    ) -> Option<Self> {
        Some(Self {
            source: source.clone(),
            settings: settings.clone(),
            at: fetched.at,
            refresh_after: fetched.refresh_after()?,
        })
    }
}
