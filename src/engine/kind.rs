//! What a lock kind must say. Values in, values out: no async, no I/O, no clock.

use std::{
    fmt,
    num::NonZeroU32,
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use crate::{
    meter::Of,
    options::Backoff,
    owner::OwnerId,
    store::{Arg, Call, Script},
};

/// One acquire, as a kind sees it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms<'a> {
    pub(crate) owner: &'a OwnerId,
    /// 0: no TTL, which only a kind that is endless is asked for.
    pub(crate) lease_ms: u64,
    /// The count that this call leads to: one more than before.
    pub(crate) holds: u32,
    /// The caller will wait if the lock is busy.
    pub(crate) waits: bool,
    /// It may be granted the lock while it waits.
    pub(crate) turn: Option<Turn>,
}

/// The number of a wait that may be granted the lock: see [`super::turn`]. With the server's time it names a place in the queue,
/// and no other that its owner had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Turn(NonZeroU32);

impl Turn {
    const FIRST: NonZeroU32 = NonZeroU32::MIN.saturating_add(1);
    const COUNT: u32 = 1022;

    pub(super) fn next(taken: &AtomicU32) -> Self {
        Self(Self::FIRST.saturating_add(taken.fetch_add(1, Ordering::Relaxed) % Self::COUNT))
    }

    pub(crate) fn number(self) -> u32 {
        self.0.get()
    }
}

/// Whether a hold that was given away is asked for, and what is in doubt for that very reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Adopts {
    First,
    Again,
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
    /// Whoever holds the sibling would wait for itself.
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

/// What a kind is, as far as the engine must know.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "each is a question of its own")]
pub(crate) struct About {
    /// Kinds of one family share their record, and hence their hold counts.
    pub(crate) family: &'static str,
    /// What it is called where things are counted and told.
    pub(crate) label: &'static str,
    /// Its owner may take it again.
    pub(crate) reentrant: bool,
    /// An owner may be any text: see [`AcquireOptions::value`](crate::AcquireOptions::value).
    pub(crate) values: bool,
    /// A hold without a lease lasts until it is released, without a TTL and without the watchdog.
    pub(crate) endless: bool,
    /// Waiting leaves something on the server, which a release with a count of zero takes back.
    pub(crate) queues: bool,
    /// Each owner's waiters have a channel of their own, and may be granted the lock there: see [`Turn`].
    pub(crate) own_channel: bool,
    /// Its guards carry a fencing token.
    pub(crate) token: bool,
    /// Many owners may hold it together.
    pub(crate) shared: bool,
    /// How often one owner may hold it, whatever the client's configuration says.
    pub(crate) max_holds: u32,
    /// The kind that the same owner may hold at the same name, under the same name of its own.
    pub(crate) sibling: Option<Sibling>,
    /// The family whose record is the same, but whose counts are not kept together with its: no owner has both.
    pub(crate) rival: Option<&'static str>,
    /// A hold may go from one waiter of a client to the next without the server being asked: see [`Baton`](super::baton).
    pub(crate) relayed: bool,
}

impl About {
    /// A kind that is nothing but reentrant.
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
            shared: false,
            max_holds: u32::MAX,
            sibling: None,
            rival: None,
            relayed: false,
        }
    }

    /// Whether its waiters' channel is also that of waiters for a sibling, of which one shares and the other does not.
    pub(crate) fn has_two_sides(&self) -> bool {
        self.sibling.is_some()
    }
}

/// A lock kind: what it is, and which scripts to run on which keys. The engine does the rest.
pub(crate) trait Kind: Send + Sync + fmt::Debug + 'static {
    fn about(&self) -> About;

    /// Where its verbs are: here, or with the kind that it is made of.
    fn verbs(&self) -> &dyn Verbs;
}

impl dyn Kind {
    /// What is counted of it.
    pub(crate) fn of(&self) -> Of<'_> {
        Of { kind: self.about().label, lock: self.name() }
    }
}

impl Deref for dyn Kind {
    type Target = dyn Verbs;

    fn deref(&self) -> &dyn Verbs {
        self.verbs()
    }
}

/// The keys and scripts of a lock kind.
pub(crate) trait Verbs: Send + Sync + 'static {
    /// The lock's name.
    fn name(&self) -> &Arc<str>;

    /// The key of its record.
    fn record(&self) -> &Arc<str> {
        self.name()
    }

    /// How waiters of this owner are woken.
    fn wake(&self, owner: &OwnerId) -> Wake;

    /// Where an element of a list wakes waiters: pushes it again, if the lock is free.
    fn signal(&self) -> Option<Call> {
        None
    }

    /// Where an element of a list wakes waiters: pushes one to `bell`, a list of the client's own, which then lives so long.
    fn ring(&self, _bell: &Arc<str>, _life: Duration) -> Option<Call> {
        None
    }

    /// Makes the owner hold the lock as often as requested.
    fn acquire(&self, terms: Terms<'_>) -> Call;

    /// Makes `owner` hold the lock `holds` times, fewer than before. With 0, nothing of him is left.
    fn release(&self, owner: &OwnerId, holds: u32) -> Call;

    /// The same, if the server records exactly `seen` holds: for whoever does not keep the count alone.
    fn release_if(&self, owner: &OwnerId, holds: u32, seen: u32) -> Call {
        let mut call = self.release(owner, holds);
        call.args[1] = Arg::Text(format!("{seen}>{holds}").into());
        call
    }

    /// The same by the lock's record alone, if it has other keys besides: a cluster may have some of them elsewhere. That it
    /// answers "not held" proves nothing where the other keys may say something else: see [`Verbs::record_is_all`].
    fn release_record(&self, _owner: &OwnerId, _holds: u32) -> Option<Call> {
        None
    }

    /// Whether the record alone says who holds the lock: its "not held" is believed then.
    fn record_is_all(&self) -> bool {
        false
    }

    /// Makes `to` hold what `from` holds, once, with this lease in milliseconds (0 as with [`Terms::lease_ms`]).
    fn transfer(&self, from: &OwnerId, to: &OwnerId, lease_ms: u64) -> Call;

    /// The same, and what an acquire gives besides, such as a token.
    fn adopt(&self, from: &OwnerId, to: &OwnerId, lease_ms: u64) -> Call {
        self.transfer(from, to, lease_ms)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_come_again_after_a_thousand_others() {
        let taken = AtomicU32::new(0);
        let next = || Turn::next(&taken).number();
        let first: Vec<_> = (0..Turn::COUNT).map(|_| next()).collect();
        assert_eq!(first, (2..=1023).collect::<Vec<_>>(), "as the script knows them");
        assert!(first.into_iter().eq((0..Turn::COUNT).map(|_| next())));
        taken.store(u32::MAX, Ordering::Relaxed);
        assert!((0..2).all(|_| (2..=1023).contains(&Turn::next(&taken).number())));
    }
}
