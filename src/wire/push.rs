//! What a server sends that is not a reply to a request.

use std::sync::Arc;

/// A message or notice from the server that is not a reply to a request.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Push<'m> {
    Message {
        channel: &'m str,
        text: &'m [u8],
    },
    /// Messages were lost on the way.
    #[cfg_attr(
        not(any(feature = "fred", test)),
        expect(dead_code, reason = "the own connection misses none")
    )]
    Missed,
    /// The server has ended a subscription, because the channel's slot has moved.
    Dropped {
        channel: &'m str,
    },
}

/// A receiver of pushes.
pub(crate) type Sink = Arc<dyn Fn(Push<'_>) + Send + Sync>;
