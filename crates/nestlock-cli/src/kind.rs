//! The kinds of locks, by name.

use clap::ValueEnum;
use nestlock::{Lock, LockClient, Result};

use crate::locks::Record;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    /// `mutex` means the same.
    #[value(alias = "mutex")]
    Reentrant,
    NonReentrant,
    Fair,
    NonReentrantFair,
    Fenced,
    Spin,
    Signal,
    String,
    Read,
    Write,
    /// One of several permits of a name.
    Permits,
    /// A permit of a semaphore.
    Semaphore,
}

impl Kind {
    pub(crate) fn lock(self, client: &LockClient, name: &str) -> Result<Lock> {
        match self {
            Self::Reentrant => client.reentrant_lock(name),
            Self::NonReentrant => client.non_reentrant_lock(name),
            Self::Fair => client.fair_lock(name),
            Self::NonReentrantFair => client.non_reentrant_fair_lock(name),
            Self::Fenced => client.fenced_lock(name),
            Self::Spin => client.spin_lock(name),
            Self::Signal => client.signal_lock(name),
            Self::String => client.string_lock(name),
            Self::Read => Ok(client.read_write_lock(name)?.read_lock()),
            Self::Write => Ok(client.read_write_lock(name)?.write_lock()),
            // `exec` knows how many there are; to the others it does not matter
            Self::Permits => client.permits(name, 1)?.many(1),
            Self::Semaphore => client.semaphore(name)?.many(1),
        }
    }

    /// Returns a kind that can free a record of this sort.
    pub(crate) fn of(record: Record) -> Self {
        match record {
            Record::Reentrant => Self::Reentrant,
            Record::Fair => Self::Fair,
            Record::Read => Self::Read,
            Record::Write => Self::Write,
            Record::Signal => Self::Signal,
            Record::String => Self::String,
            Record::Permits => Self::Permits,
            Record::Semaphore => Self::Semaphore,
        }
    }

    /// Returns whether a lock of this kind may have a record of this sort.
    pub(crate) fn has(self, record: Record) -> bool {
        match self {
            Self::Reentrant
            | Self::NonReentrant
            | Self::Fair
            | Self::NonReentrantFair
            | Self::Fenced
            | Self::Spin => {
                matches!(record, Record::Reentrant | Record::Fair)
            }
            // the record may be that of either half of the same lock
            Self::Read | Self::Write => matches!(record, Record::Read | Record::Write),
            Self::Signal => record == Record::Signal,
            Self::String => record == Record::String,
            Self::Permits => record == Record::Permits,
            Self::Semaphore => record == Record::Semaphore,
        }
    }

    /// Returns the names of the kind in the table of permissions.
    pub(crate) fn permissions(self) -> &'static [&'static str] {
        match self {
            Self::Reentrant | Self::NonReentrant | Self::Spin => &["reentrant"],
            Self::Fair | Self::NonReentrantFair => &["fair"],
            Self::Fenced => &["fenced"],
            Self::Signal => &["signal"],
            Self::String => &["string"],
            Self::Read | Self::Write => &["read-write"],
            Self::Permits => &["permits", "fair permits"],
            Self::Semaphore => &["semaphore"],
        }
    }

    /// Returns the name of the kind on the command line.
    pub(crate) fn name(self) -> String {
        self.to_possible_value()
            .map(|value| value.get_name().to_owned())
            .unwrap_or_default()
    }
}
