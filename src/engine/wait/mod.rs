//! Waiting for a lock, from the bottom up: gates, the hub that has them all, who listens for it, and who waits.

pub(super) mod relay;

pub(super) mod gate;
pub(super) mod hub;

pub(super) mod lists;
pub(super) mod messages;

pub(super) mod place;
pub(super) mod waiter;

#[cfg(test)]
mod tests;
