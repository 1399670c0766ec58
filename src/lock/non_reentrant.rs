//! Any kind, but its owner may not take it again. Redisson's `NonReentrantLock` and `NonReentrantFairLock`.
//!
//! An owner is never in two clients, so the client's own books know whether it holds the lock: nothing is sent.

use crate::engine::{About, Kind, Verbs};

#[derive(Debug)]
pub(crate) struct NonReentrant<K>(pub(crate) K);

impl<K: Kind> Kind for NonReentrant<K> {
    fn about(&self) -> About {
        About { reentrant: false, ..self.0.about() }
    }

    fn verbs(&self) -> &dyn Verbs {
        self.0.verbs()
    }
}
