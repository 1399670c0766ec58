//! Why an acquire is not sent.

use super::failure::silent;
use crate::{
    error::{Error, LossReason},
    owner::OwnerId,
};

/// Why an acquire is not sent.
#[derive(Debug)]
pub(super) enum Refusal {
    /// A guard of what was lost lives.
    Lost(OwnerId, LossReason),
    NotReentrant(OwnerId),
    NoToken(OwnerId),
    TooManyHolds(OwnerId, u32),
    /// Its owner has no other name, and something may still be executed under this one: also whoever waits is told, since a
    /// release that comes late would end what it acquires.
    ValueInDoubt,
    SiblingInDoubt,
    /// It would wait for its own hold of the sibling.
    Upgrade(OwnerId),
}

impl Refusal {
    /// As the caller is told it.
    pub(super) fn into_error(self, lock: &str) -> Error {
        let lock = lock.to_owned();
        match self {
            Self::Lost(owner, reason) => Error::Lost { lock, owner, reason },
            Self::NotReentrant(owner) => Error::NotReentrant { lock, owner },
            Self::NoToken(owner) => Error::NoToken { lock, owner },
            Self::TooManyHolds(owner, holds) => Error::TooManyHolds { lock, owner, holds },
            Self::Upgrade(owner) => Error::UpgradeRefused { lock, owner },
            Self::ValueInDoubt => Error::Unconfirmed {
                lock,
                source: silent("an earlier request with this value was never answered; wait, or use another value"),
            },
            Self::SiblingInDoubt => Error::Unconfirmed {
                lock,
                source: silent(
                    "a hold inside the other one was given away, or a request about it was never answered; release the \
                     other one first",
                ),
            },
        }
    }
}
