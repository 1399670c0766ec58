//! Waiting for a lock or a latch, from the bottom up: what is awaited, hand-off slots, wait queues,
//! the subscriptions that own the queues, the tasks that listen, and the waiters.

pub(super) mod awaited;
pub(super) mod relay;

pub(super) mod queue;
pub(super) mod subscriptions;

pub(super) mod lists;
pub(super) mod messages;

pub(super) mod place;
pub(super) mod waiter;

#[cfg(test)]
mod tests;
