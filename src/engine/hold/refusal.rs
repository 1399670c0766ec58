//! Reasons for which the client refuses an acquire without sending it.

use crate::{
    engine::failure::no_reply,
    error::{Error, LossReason},
    owner::OwnerId,
};

/// Why an acquire is not sent.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// A guard of a lost hold is still alive.
    Lost(OwnerId, LossReason),
    NotReentrant(OwnerId),
    NoToken(OwnerId),
    TooManyHolds(OwnerId, u32),
    /// The owner of one acquire no longer holds anything.
    AcquireEnded(OwnerId),
    /// The owner is a value, which has no other name, and an earlier request under it may still
    /// run. Waiters get this error too: a late release would end what they acquire.
    ValueInDoubt,
    SiblingInDoubt,
    /// The owner would wait for its own hold of the sibling.
    Upgrade(OwnerId),
}

impl Refusal {
    /// Returns the error that the caller gets.
    pub(crate) fn into_error(self, lock: &str) -> Error {
        let lock = lock.to_owned();
        match self {
            Self::Lost(owner, reason) => Error::Lost {
                lock,
                owner,
                reason,
            },
            Self::NotReentrant(owner) => Error::NotReentrant { lock, owner },
            Self::NoToken(owner) => Error::NoToken { lock, owner },
            Self::TooManyHolds(owner, holds) => Error::TooManyHolds { lock, owner, holds },
            Self::AcquireEnded(owner) => Error::InvalidOwner {
                owner: owner.to_string(),
                reason: "it belongs to one acquire, whose hold has ended; \
                         acquire without an owner, or as one of LockClient::owner",
            },
            Self::Upgrade(owner) => Error::UpgradeRefused { lock, owner },
            Self::ValueInDoubt => Error::Unconfirmed {
                lock,
                source: no_reply(
                    "an earlier request with this value got no reply; wait, or use another value",
                ),
            },
            Self::SiblingInDoubt => Error::Unconfirmed {
                lock,
                source: no_reply(
                    "a hold inside the other half was left to its lease, or a request about it got no reply; \
                     release the other half first",
                ),
            },
        }
    }
}
