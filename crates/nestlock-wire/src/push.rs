//! What a server sends that is not a reply to a request.

use std::sync::Arc;

/// A message or notice from the server that is not a reply to a request.
///
/// For an example, see [`Sink`].
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
///
/// ```
/// use std::sync::Arc;
///
/// use nestlock_wire::{Push, Sink};
///
/// let sink: Sink = Arc::new(|push: Push<'_>| match push {
///     Push::Message { channel, text } => println!("{channel}: {} bytes", text.len()),
///     Push::Missed => println!("messages were lost"),
///     Push::Dropped { channel } => println!("subscribe to {channel} again"),
/// });
/// sink(Push::Missed);
/// ```
pub type Sink = Arc<dyn Fn(Push<'_>) + Send + Sync>;
