//! The options of a cache.

use std::time::Duration;

/// What the builder methods of [`Cached`](super::Cached) set.
#[derive(Debug, Clone)]
pub(super) struct Options {
    pub(super) ttl: Duration,
    pub(super) none_ttl: Option<Duration>,
    pub(super) error_ttl: Duration,
    pub(super) stale_for: Duration,
    pub(super) beta: f64,
    pub(super) lease: Duration,
    pub(super) wait: Duration,
}
