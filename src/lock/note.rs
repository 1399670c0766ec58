//! Notes of holders: why a lock is held, and by which program.
//!
//! A note has a key of its own beside the record. [`Anchor::keep_note`] keeps it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use futures_util::future::join_all;
use nestlock_wire::{Arg, Call};

use super::handle::{Lock, LockInner, SingleLock};

use crate::{
    engine::{Anchor, MOST_KEYS, NoteCalls, hold::Entered},
    error::Result,
    guard::LockGuard,
    keys::note_key,
    options::{AcquireOptions, checked_note},
    owner::OwnerId,
    store::{Inspected, script},
};

script!(WRITE = "note/write", keys = 1, args = 3);
script!(ERASE = "note/erase", keys = 1, args = 1);
script!(READ = "note/read", keys = 0 + 1 per_lock, args = 0);

/// The last turn of a note: that of a later hold replaces that of an earlier one of the same owner.
/// Turns are microseconds since 1970, because another process may have held the lock under this owner.
static TURN: AtomicU64 = AtomicU64::new(0);

/// Returns the turn of a note that begins now.
fn next_turn(since: Duration) -> u64 {
    let now = u64::try_from(since.as_micros()).unwrap_or(0);
    let later = |last: u64| Some(now.max(last + 1));
    let last = TURN.fetch_update(Ordering::Relaxed, Ordering::Relaxed, later);
    last.map_or(now, |last| now.max(last + 1))
}

/// Why a lock is held, and by which program; see [`AcquireOptions::note`].
///
/// ```
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = nestlock_embedded::EmbeddedServer::start()?;
/// # let client = nestlock::LockClient::connect(server.url()).await?;
/// use nestlock::AcquireOptions;
///
/// let lock = client.mutex("import")?;
/// let guard = lock.lock_with(AcquireOptions::new().note("nightly import")).await?;
/// # while lock.notes().await?.is_empty() {}
/// for held in lock.notes().await? {
///     println!("{} on {}: {}", held.application, held.host, held.note);
/// }
/// guard.unlock().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct HolderNote {
    /// The owner that holds the lock.
    pub owner: OwnerId,
    /// Why.
    pub note: String,
    /// Since when, by the clock of its host.
    pub since: SystemTime,
    /// The client's [`application`](crate::LockClientBuilder::application), or the name of its program.
    pub application: String,
    /// The host on which it runs.
    pub host: String,
    /// Its process ID on that host.
    pub process: u32,
}

impl HolderNote {
    /// Parses what `lua/note/write.lua` writes. Returns `None` if no client writes such a text: it may
    /// be long, or meant to harm a terminal. For the command line.
    #[doc(hidden)]
    #[must_use]
    pub fn parse(owner: &OwnerId, text: &str) -> Option<Self> {
        let mut lines = text.splitn(3, '\n');
        let (_turn, since) = lines.next()?.split_once(' ')?;
        let (program, note) = (lines.next()?, lines.next()?);
        checked_note("", note).ok()?;
        let is_plain = program.len() < 1024 && program.bytes().all(|byte| byte.is_ascii_graphic());
        let [application, host, process] =
            <[&str; 3]>::try_from(program.split(':').collect::<Vec<_>>()).ok()?;
        is_plain.then_some(Self {
            owner: owner.clone(),
            note: note.to_owned(),
            since: SystemTime::UNIX_EPOCH
                .checked_add(Duration::from_millis(since.parse().ok()?))?,
            application: application.to_owned(),
            host: host.to_owned(),
            process: process.parse().ok()?,
        })
    }
}

/// Returns the guard of a hold, and has its note kept if the options have one.
pub(super) fn guard(anchor: &Arc<Anchor>, entered: Entered, options: &AcquireOptions) -> LockGuard {
    if let Some(note) = &options.rare().note {
        let (hold, ticket) = &entered;
        let (name, owner) = (hold.lock_name(), &ticket.generation.owner);
        let key = || [note_key(name, owner.as_str())];
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let since = since.unwrap_or_default();
        let turn = next_turn(since);
        let text = format!("{}\n{}\n{note}", since.as_millis(), anchor.store.program());
        // the life comes with each write
        let written = [0_u64.into(), turn.into(), Arg::Text(text.into())];
        let calls = NoteCalls {
            write: Call::new(&WRITE, key(), written),
            erase: Call::new(&ERASE, key(), [turn.into()]),
        };
        anchor.keep_note(Arc::clone(name), &ticket.generation, calls);
    }
    LockGuard::new(Arc::clone(anchor), entered)
}

impl Lock {
    /// Returns the notes of the lock's holders, of those that have one: see [`AcquireOptions::note`].
    /// Two requests.
    ///
    /// For several locks: the notes of their holders, each once, of those members whose servers reply.
    ///
    /// # Errors
    ///
    /// As [`inspect`](Self::inspect); for several locks, if no member can be read.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn notes(&self) -> Result<Vec<HolderNote>> {
        match &self.inner {
            LockInner::One(single) => single.notes().await,
            LockInner::Several(several) => {
                let read = several
                    .members()
                    .iter()
                    .map(|member| Box::pin(member.notes()));
                let (mut notes, mut error, mut any) = (Vec::new(), None, false);
                for read in join_all(read).await {
                    match read {
                        Ok(read) => (any, notes) = (true, joined(notes, read)),
                        Err(failed) => error = Some(failed),
                    }
                }
                error.filter(|_| !any).map_or(Ok(notes), Err)
            }
        }
    }
}

/// Returns these notes, and those of the others that are about other owners or have another text.
fn joined(mut notes: Vec<HolderNote>, others: Vec<HolderNote>) -> Vec<HolderNote> {
    for other in others {
        let is_it = |note: &HolderNote| note.owner == other.owner && note.note == other.note;
        if !notes.iter().any(is_it) {
            notes.push(other);
        }
    }
    notes
}

impl SingleLock {
    async fn notes(&self) -> Result<Vec<HolderNote>> {
        let Self { anchor, kind } = self;
        let Inspected::Held { holders, .. } = anchor.inspect(kind).await? else {
            return Ok(Vec::new());
        };
        let mut notes = Vec::new();
        for holders in holders.chunks(MOST_KEYS) {
            let keys = holders
                .iter()
                .map(|(owner, _)| note_key(kind.name(), owner.as_str()));
            let texts = anchor
                .texts(kind.name(), &Call::new(&READ, keys, []))
                .await?;
            let read = holders.iter().zip(texts);
            notes.extend(read.filter_map(|((owner, _), text)| HolderNote::parse(owner, &text)));
        }
        Ok(notes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_rise_whatever_the_clock_says() {
        let at = |micros| next_turn(Duration::from_micros(micros));
        let first = at(u64::from(u32::MAX));
        let turns = [first, at(7), at(7), at(first + 9), at(first)];
        assert!(turns.is_sorted_by(|one, other| one < other), "{turns:?}");
    }

    #[test]
    fn a_note_is_read_as_it_is_written() {
        let owner = OwnerId::recorded("0a1b2c3d-1111-4222-8333-444455556666:42");
        let note =
            HolderNote::parse(&owner, "7 1700000000123\nshop:web-1:77\nnightly: a b").unwrap();
        assert_eq!(
            (&*note.application, &*note.host, note.process, &*note.note),
            ("shop", "web-1", 77, "nightly: a b")
        );
        assert_eq!(
            note.since,
            SystemTime::UNIX_EPOCH + Duration::from_millis(1_700_000_000_123)
        );
        for odd in [
            "",
            "7\na:b:1\nx",
            "7 1\na:b\nx",
            "7 1\na:b:1",
            "7 1\na:b:1\n",
            "7 1\na:b:1\nx\ny",
            "7 1\n\u{1b}[2J:b:1\nx",
            "7 1\na:b:1\n\u{202e}x",
            &format!("7 1\na:b:1\n{}", "x".repeat(257)),
        ] {
            assert_eq!(HolderNote::parse(&owner, odd), None, "{odd:?}");
        }
    }
}
