//! The limits of every connection, for both clients.

use std::time::Duration;

/// How many requests may be in flight on one connection.
pub(crate) const MAX_IN_FLIGHT: usize = 50_000;

/// How long after a refusal each write ends with a PING, so that the next refusal is proven as soon
/// as it arrives.
pub(crate) const REFUSED: Duration = Duration::from_secs(2);
