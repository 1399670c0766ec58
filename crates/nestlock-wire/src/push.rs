//! What a server sends that is not a reply to a request.

use std::sync::Arc;

/// A message or notice from the server that is not a reply to a request.
#[derive(Debug, Clone, Copy)]
pub enum Push<'m> {
    /// A message of a channel.
    Message {
        /// The channel.
        channel: &'m str,
        /// What was published.
        text: &'m [u8],
    },
    /// Messages were lost on the way.
    Missed,
    /// The server has ended a subscription, because the channel's slot has moved.
    Dropped {
        /// The channel.
        channel: &'m str,
    },
}

/// A receiver of pushes.
pub type Sink = Arc<dyn Fn(Push<'_>) + Send + Sync>;
