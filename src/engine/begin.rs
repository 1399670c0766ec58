//! What is known of the first connection, of a client that connects when it is used.

use tokio::sync::{Notify, watch};

use crate::error::{Error, StoreError};

#[derive(Debug, Default)]
pub(super) struct Beginning {
    /// Told when somebody needs it.
    wanted: Notify,
    tries: watch::Sender<Tries>,
}

#[derive(Debug, Default)]
struct Tries {
    failed: u64,
    /// Why the last one failed.
    why: Option<Error>,
}

impl Beginning {
    /// All who wait look again: there is a connection, or there never will be.
    pub(super) fn tell(&self) {
        self.tries.send_modify(|_| {});
    }

    /// Waits until somebody needs a connection.
    pub(super) async fn wanted(&self) {
        self.wanted.notified().await;
    }

    pub(super) fn failed(&self, why: Error) {
        self.tries.send_modify(|tries| {
            tries.failed += 1;
            tries.why = Some(why);
        });
    }

    /// Needs a connection, and waits until this is so. `Some`: the next try to make one has failed before.
    pub(super) async fn want(&self, is_so: impl Fn() -> bool) -> Option<Error> {
        let mut told = self.tries.subscribe();
        let before = told.borrow().failed;
        self.wanted.notify_one();
        let tries = told.wait_for(|tries| tries.failed > before || is_so()).await.ok()?;
        tries.why.as_ref().map(again).filter(|_| !is_so())
    }

    /// Waits until this is so.
    pub(super) async fn until(&self, is_so: impl Fn() -> bool) {
        let _ = self.tries.subscribe().wait_for(|_| is_so()).await;
    }
}

/// The same once more, for somebody else who asked.
fn again(error: &Error) -> Error {
    match error {
        Error::Connect { address, source } => {
            let again = StoreError::new(source.kind(), source.may_have_executed(), source.said());
            Error::Connect { address: address.clone(), source: again.about(source.command()) }
        }
        Error::InvalidConfig { reason } => Error::InvalidConfig { reason: reason.clone() },
        _ => Error::Closed,
    }
}
