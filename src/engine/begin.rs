//! The first connection of a client that connects lazily.

use tokio::sync::{Notify, watch};

use super::failure;

use crate::error::Error;

/// The requests for a first connection, and the failed attempts at one.
#[derive(Debug, Default)]
pub(super) struct Beginning {
    /// Notified when a call needs a connection.
    wanted: Notify,
    tries: watch::Sender<Tries>,
}

#[derive(Debug, Default)]
struct Tries {
    failed: u64,
    /// Why the last attempt failed.
    why: Option<Error>,
}

impl Beginning {
    /// Wakes all waiting calls to re-check: the client is connected, or is closed.
    pub(super) fn tell(&self) {
        self.tries.send_modify(|_| {});
    }

    /// Waits until a call needs a connection.
    pub(super) async fn wanted(&self) {
        self.wanted.notified().await;
    }

    pub(super) fn failed(&self, why: Error) {
        self.tries.send_modify(|tries| {
            tries.failed += 1;
            tries.why = Some(why);
        });
    }

    /// Requests a connection and waits until `is_so`. Returns `Some` if the next attempt failed
    /// first.
    pub(super) async fn want(&self, is_so: impl Fn() -> bool) -> Option<Error> {
        let mut told = self.tries.subscribe();
        // before the notification: a connect that fails at once must count
        let before = told.borrow().failed;
        self.wanted.notify_one();
        let tries = told
            .wait_for(|tries| tries.failed > before || is_so())
            .await
            .ok()?;
        tries.why.as_ref().map(again).filter(|_| !is_so())
    }

    /// Waits until `is_so`.
    pub(super) async fn until(&self, is_so: impl Fn() -> bool) {
        let _ = self.tries.subscribe().wait_for(|_| is_so()).await;
    }
}

/// Copies an error for a further caller: `Error` is not `Clone`.
fn again(error: &Error) -> Error {
    match error {
        Error::Connect { address, source } => Error::Connect {
            address: address.clone(),
            source: failure::again(source),
        },
        Error::InvalidConfig { reason } => Error::InvalidConfig {
            reason: reason.clone(),
        },
        _ => Error::Closed,
    }
}
