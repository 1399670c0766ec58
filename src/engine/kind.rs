//! What a lock kind must say. Values in, values out: no async, no I/O, no clock.

use std::{fmt, sync::Arc};

use crate::{
    options::Backoff,
    owner::OwnerId,
    store::{Arg, Call, Script},
};

/// One acquire, as a kind sees it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request<'a> {
    pub(crate) owner: &'a OwnerId,
    /// 0: no TTL, which only a kind that is endless is asked for.
    pub(crate) lease_ms: u64,
    /// The count that this call leads to: one more than before.
    pub(crate) holds: u32,
    /// The caller will wait if the lock is busy.
    pub(crate) waits: bool,
}

/// How a waiter learns that it is worth trying again.
#[derive(Debug)]
pub(crate) enum Wake {
    /// By messages of this channel, and by looking once in a while.
    Channel(Arc<str>),
    /// By an element of this list, which is for whoever pops it, and by looking once in a while.
    Signal(Arc<str>),
    /// By trying again, after pauses.
    Poll(Box<Backoff>),
}

/// Another kind whose records share this one's: the other half of a read-write lock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sibling {
    pub(crate) family: &'static str,
    /// Whoever holds the sibling would wait for himself.
    pub(crate) excludes: bool,
}

/// The scripts that take several locks of one family for one owner, and give them back, by one request each. Their keys
/// are the locks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Together {
    /// Arguments: the owner and the lease.
    pub(crate) acquire: &'static Script,
    /// Arguments: for each lock its owner, and where its waiters listen.
    pub(crate) release: &'static Script,
}

/// A lock kind: which scripts to run on which keys. The engine does the rest.
pub(crate) trait Kind: Send + Sync + fmt::Debug + 'static {
    /// The lock's name.
    fn name(&self) -> &Arc<str>;

    /// The key of its record.
    fn record(&self) -> &Arc<str> {
        self.name()
    }

    /// Kinds of one family share their record, and hence their hold counts.
    fn family(&self) -> &'static str;

    /// How waiters of this owner are woken.
    fn wake(&self, owner: &OwnerId) -> Wake;

    /// Whether its owner may take it again.
    fn is_reentrant(&self) -> bool {
        true
    }

    /// Whether an owner may be any text: see [`AcquireOptions::value`](crate::AcquireOptions::value).
    fn takes_values(&self) -> bool {
        false
    }

    /// Whether a hold without a lease lasts until it is released, without a TTL and without the watchdog.
    fn is_endless(&self) -> bool {
        false
    }

    /// Whether waiting leaves something on the server, which a release with a count of zero takes back.
    fn queues(&self) -> bool {
        false
    }

    /// Whether each owner's waiters have a channel of their own.
    fn has_own_channel(&self) -> bool {
        false
    }

    /// How often one owner may hold it, whatever the client's configuration says.
    fn max_holds(&self) -> u32 {
        u32::MAX
    }

    /// Whether its guards carry a fencing token.
    fn has_token(&self) -> bool {
        false
    }

    /// Whether many owners may hold it together.
    fn shares(&self) -> bool {
        false
    }

    /// Whether its waiters' channel is also that of waiters for a sibling, of which one shares and the other does not.
    fn has_two_sides(&self) -> bool {
        self.sibling().is_some()
    }

    /// The kind that the same owner may hold at the same name, under the same name of his.
    fn sibling(&self) -> Option<Sibling> {
        None
    }

    /// Where an element of a list wakes waiters: pushes it again, if the lock is free.
    fn signal(&self) -> Option<Call> {
        None
    }

    /// Makes the owner hold the lock as often as requested.
    fn acquire(&self, request: Request<'_>) -> Call;

    /// Makes `owner` hold the lock `holds` times, fewer than before. With 0, nothing of him is left.
    fn release(&self, owner: &OwnerId, holds: u32) -> Call;

    /// The same, if the server records exactly `seen` holds: for whoever does not keep the count alone. Where owners are any
    /// text, there is no count.
    fn release_if(&self, owner: &OwnerId, holds: u32, seen: u32) -> Call {
        let mut call = self.release(owner, holds);
        if !self.takes_values() {
            call.args[1] = Arg::Text(format!("{seen}>{holds}").into());
        }
        call
    }

    /// The script that renews many locks: keys are their records, arguments an owner and a lease for each.
    fn renew(&self) -> &'static Script;

    /// How to take it together with others of its family, if that can be done.
    fn together(&self) -> Option<Together> {
        None
    }

    /// Frees the lock, whoever holds it.
    fn force_release(&self) -> Call;

    /// Asks who holds the lock.
    fn inspect(&self) -> Call;
}
