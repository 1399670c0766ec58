//! The interface between the engine and a lock kind. A kind is pure: values in, values out; no
//! async, no I/O, no clock.
//!
//! Two kinds may concern one owner of one name:
//!
//! - The halves of a read-write lock (`KindInfo::sibling`) have a ledger each. The server
//!   recognizes the writer by its name, so a hold takes the name of its held sibling.
//! - A fair and a reentrant lock (`KindInfo::rival`) have one record and two ledgers: an inner
//!   release would write a count that leaves out the outer hold, and settling one would end the
//!   other. So an owner that holds one, or waits for it, is refused the other (`NotReentrant`, or
//!   `Lost` inside a loss). A change that the server does not know of yet is settled first
//!   (`Core::settle_rival`). The check comes after the caller's own request is marked as in doubt,
//!   so of two concurrent calls at least one sees the other.

use std::{
    fmt,
    num::NonZeroU32,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use nestlock_wire::{Arg, Call, Script};

use crate::{meter::Of, options::Backoff, owner::OwnerId};

/// The parameters of one acquire, as a kind sees them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AcquireTerms<'a> {
    pub(crate) owner: &'a OwnerId,
    /// Milliseconds. 0: no TTL, for endless kinds only.
    pub(crate) lease_ms: u64,
    /// The hold count that this call leads to: one more than before.
    pub(crate) holds: u32,
    /// Whether the caller waits if the lock is busy.
    pub(crate) waits: bool,
    /// Set if the lock may be granted to this waiter by a release.
    pub(crate) wait_id: Option<WaitId>,
}

/// The number of a wait to which a release may grant the lock: see [`super::hold::granted`]. Together with
/// the server's time it identifies one place in the queue, and no earlier place of the same owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WaitId(NonZeroU32);

impl WaitId {
    // 2 to 1023: the script `fair/acquire` stores the number as a fraction of 1024 in the score of
    // the place, and takes 1 for a wait without a number.
    const FIRST: NonZeroU32 = NonZeroU32::MIN.saturating_add(1);
    const COUNT: u32 = 1022;

    pub(super) fn next(taken: &AtomicU32) -> Self {
        Self(Self::FIRST.saturating_add(taken.fetch_add(1, Ordering::Relaxed) % Self::COUNT))
    }

    pub(crate) fn number(self) -> u32 {
        self.0.get()
    }
}

/// The attempt of an adoption: the first, or a retry while its outcome is in doubt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Adopts {
    First,
    Again,
}

/// How a waiter learns that a retry may succeed.
#[derive(Debug)]
pub(crate) enum Wake {
    /// By messages on this channel, and by occasional polls.
    Channel(Arc<str>),
    /// By an element of this list, which wakes the one waiter that pops it, and by occasional
    /// polls.
    Signal(Arc<str>),
    /// By retries with back-off.
    Poll(Box<Backoff>),
}

/// Another kind that shares the record of this kind: the other half of a read-write lock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sibling {
    pub(crate) family: &'static str,
    /// Whether a holder of the sibling cannot also acquire this kind: it would wait for itself.
    pub(crate) excludes: bool,
}

/// The most permits of one holder. Each is an entry of the record, which a script adds, renews and
/// removes while other clients wait for the server.
pub(crate) const MOST_PERMITS: u32 = 100;

/// The side of waiters of another kind: see [`Kind::heard`].
pub(crate) const HEARD_SIDE: usize = MOST_PERMITS as usize;

/// How many holders there may be at the same time, and so which waiters a message wakes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// One. A message wakes one waiter.
    Exclusive,
    /// Any number, while the sibling is not held. A message wakes all waiters.
    Shared,
    /// As many as there are permits. A message is the number of permits that were given back, and
    /// wakes as many waiters as could get in with them.
    Counted {
        /// How many permits a holder has, at most [`MOST_PERMITS`].
        takes: u32,
    },
}

impl Sharing {
    /// Returns the number of the side of the wait queue where its waiters sleep.
    pub(crate) fn side(self) -> usize {
        match self {
            Self::Exclusive => 0,
            Self::Shared => 1,
            Self::Counted { takes } => takes.saturating_sub(1) as usize,
        }
    }

    /// Returns the number of entries that a holder has in the record.
    pub(crate) fn entries(self) -> u16 {
        match self {
            Self::Exclusive | Self::Shared => 1,
            Self::Counted { takes } => u16::try_from(takes).unwrap_or(u16::MAX),
        }
    }
}

/// The scripts that acquire, and release, several locks of one family for one owner by one request.
/// Their keys are the locks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct JointScripts {
    /// Arguments: the owner and the lease.
    pub(crate) acquire: &'static Script,
    /// Arguments: for each lock its owner and the channel of its waiters.
    pub(crate) release: &'static Script,
}

/// The properties of a kind that the engine must know.
#[derive(Debug, Clone, Copy)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is an independent property"
)]
pub(crate) struct KindInfo {
    /// Kinds of one family share their record and hence their hold counts.
    pub(crate) family: &'static str,
    /// Its name in metrics and logs.
    pub(crate) label: &'static str,
    /// Its owner may acquire it again.
    pub(crate) reentrant: bool,
    /// An owner may be any text: see [`AcquireOptions::value`](crate::AcquireOptions::value).
    pub(crate) values: bool,
    /// A hold without a lease lasts until it is released, without a TTL and without the watchdog.
    pub(crate) endless: bool,
    /// Waiting writes to the server; a release with a count of 0 undoes that.
    pub(crate) queues: bool,
    /// The waiters of each owner have their own channel, where a release may grant them the lock:
    /// see [`WaitId`].
    pub(crate) own_channel: bool,
    /// Its guards carry a fencing token.
    pub(crate) token: bool,
    pub(crate) sharing: Sharing,
    /// Highest hold count of one owner, whatever the client is configured to allow.
    pub(crate) max_holds: u32,
    /// The kind that the same owner may hold under the same lock name and owner name.
    pub(crate) sibling: Option<Sibling>,
    /// The family that uses the same record but a separate hold count: no owner may hold both.
    pub(crate) rival: Option<&'static str>,
    /// A hold may pass between waiters of one client without a request: see
    /// [`hand_off`](super::hold::hand_off).
    pub(crate) relayed: bool,
}

impl KindInfo {
    /// Returns the properties of a kind that is reentrant and nothing else.
    pub(crate) const fn plain(family: &'static str) -> Self {
        Self {
            family,
            label: family,
            reentrant: true,
            values: false,
            endless: false,
            queues: false,
            own_channel: false,
            token: false,
            sharing: Sharing::Exclusive,
            max_holds: u32::MAX,
            sibling: None,
            rival: None,
            relayed: false,
        }
    }

    /// Returns how many sides of waiters its channel serves: a message wakes other waiters of each.
    pub(crate) fn sides(&self) -> usize {
        match self.sharing {
            // each waiter has its own channel
            _ if self.own_channel => 1,
            Sharing::Counted { .. } => HEARD_SIDE + 1,
            _ if self.sibling.is_some() => 2,
            _ => 1,
        }
    }
}

/// A lock kind: its properties, and which scripts to run on which keys. The engine does the rest.
pub(crate) trait Kind: Send + Sync + fmt::Debug + 'static {
    fn about(&self) -> KindInfo;

    /// Returns the lock's name.
    fn name(&self) -> &Arc<str>;

    /// Returns the key of its record.
    fn record(&self) -> &Arc<str> {
        self.name()
    }

    /// Returns how waiters of this owner are woken.
    fn wake(&self, owner: &OwnerId) -> Wake;

    /// Returns another kind with the same record, and the channel of its waiters, if waiters of this one
    /// must listen there, too: a release by a program that knows no more wakes one of them.
    fn heard(&self) -> Option<(Arc<dyn Kind>, Arc<str>)> {
        None
    }

    /// For kinds with [`Wake::Signal`]: returns a call that pushes the element again if the lock is
    /// free.
    fn signal(&self) -> Option<Call> {
        None
    }

    /// For kinds with [`Wake::Signal`]: returns a call that pushes an element to `bell`, a list of
    /// the client itself. The list then lives for `_life`.
    fn ring(&self, _bell: &Arc<str>, _life: Duration) -> Option<Call> {
        None
    }

    /// Returns a call that raises the owner's hold count to the requested one.
    fn acquire(&self, terms: AcquireTerms<'_>) -> Call;

    /// Returns a call that lowers the hold count of `owner` to `holds`. 0 also removes everything
    /// that its waiting left behind.
    fn release(&self, owner: &OwnerId, holds: u32) -> Call;

    /// Like [`Kind::release`], but only if the server records exactly `seen` holds: for an owner
    /// whose count other clients may change, too.
    fn release_if(&self, owner: &OwnerId, holds: u32, seen: u32) -> Call {
        let mut call = self.release(owner, holds);
        call.args[1] = Arg::Text(format!("{seen}>{holds}").into());
        call
    }

    /// Like [`Kind::release`], but touches the record alone, for kinds with further keys, which a
    /// cluster may have on another node. A "not held" reply proves nothing if the other keys may
    /// say otherwise: see [`Kind::record_is_all`].
    fn release_record(&self, _owner: &OwnerId, _holds: u32) -> Option<Call> {
        None
    }

    /// Returns whether the record alone says which owner holds the lock. If so, a "not held" reply
    /// about the record alone is believed.
    fn record_is_all(&self) -> bool {
        false
    }

    /// Returns a call that moves the hold of `from` to `to`, with a count of 1 and this lease in
    /// milliseconds (0 as in [`AcquireTerms::lease_ms`]).
    fn transfer(&self, from: &OwnerId, to: &OwnerId, lease_ms: u64) -> Call;

    /// Like [`Kind::transfer`], and also returns what an acquire returns, such as a token.
    fn adopt(&self, from: &OwnerId, to: &OwnerId, lease_ms: u64) -> Call {
        self.transfer(from, to, lease_ms)
    }

    /// Returns the script that renews many locks: its keys are the records, its arguments an owner
    /// and a lease for each.
    fn renew(&self) -> &'static Script;

    /// Returns the same kind, but for holds with this many entries in the record. `None`: it is that
    /// kind already.
    fn of_entries(&self, _entries: u16) -> Option<Arc<dyn Kind>> {
        None
    }

    /// Returns how [`Kind::renew`] names this owner.
    fn renewed_owner(&self, owner: &OwnerId) -> Arg {
        owner.into()
    }

    /// Returns the scripts that take it together with others of its family, if it supports that.
    fn together(&self) -> Option<JointScripts> {
        None
    }

    /// Returns a call that frees the lock, whatever its owner.
    fn force_release(&self) -> Call;

    /// Returns a call that queries the holders.
    fn inspect(&self) -> Call;
}

impl dyn Kind {
    /// Returns its labels in metrics.
    pub(crate) fn of(&self) -> Of<'_> {
        Of {
            kind: self.about().label,
            lock: self.name(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_come_again_after_a_thousand_others() {
        let taken = AtomicU32::new(0);
        let next = || WaitId::next(&taken).number();
        let first: Vec<_> = (0..WaitId::COUNT).map(|_| next()).collect();
        assert_eq!(
            first,
            (2..=1023).collect::<Vec<_>>(),
            "as the script knows them"
        );
        assert!(first.into_iter().eq((0..WaitId::COUNT).map(|_| next())));
        taken.store(u32::MAX, Ordering::Relaxed);
        assert!((0..2).all(|_| (2..=1023).contains(&WaitId::next(&taken).number())));
    }
}
