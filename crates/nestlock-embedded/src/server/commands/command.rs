//! What a command is: its name, its number of words, its properties, and how it is executed.

use super::call::Call;
use crate::server::resp::Outcome;

/// The properties of a command, as bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Flags(u8);

impl Flags {
    /// It only reads.
    pub(super) const READ: Self = Self(0);
    /// It writes keys.
    pub(super) const WRITE: Self = Self(1);
    /// Scripts may not call it.
    pub(super) const NO_SCRIPT: Self = Self(2);
    /// A subscribed RESP2 connection may send it.
    pub(super) const SUBSCRIBED: Self = Self(4);
    /// CLIENT PAUSE WRITE holds it up, though it writes no keys itself.
    pub(super) const PAUSED: Self = Self(8);

    pub(super) const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

/// How a command is executed.
#[derive(Clone, Copy)]
pub(crate) enum Run {
    /// By a function that needs only the server.
    Plain(fn(&mut Call) -> Outcome),
    /// By the script engine.
    Script(ScriptCommand),
    /// By the function of a subcommand.
    Container(&'static [Command]),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ScriptCommand {
    Eval,
    EvalRo,
    EvalSha,
    EvalShaRo,
    Load,
    Exists,
    Flush,
    Kill,
}

pub(crate) struct Command {
    /// In lower case; a subcommand is `client|id`.
    pub(crate) name: &'static str,
    /// The number of words: exact if positive, a minimum if negative.
    arity: i64,
    flags: Flags,
    pub(crate) run: Run,
}

impl Command {
    pub(crate) fn is_for_scripts(&self) -> bool {
        !self.flags.has(Flags::NO_SCRIPT)
    }

    pub(crate) fn is_for_subscribed(&self) -> bool {
        self.flags.has(Flags::SUBSCRIBED)
    }

    /// Returns whether it writes keys, publishes, or may run or change scripts. CLIENT PAUSE WRITE
    /// holds it up, and read-only scripts may not call it.
    pub(crate) fn waits_for_writes(&self) -> bool {
        self.flags.has(Flags::WRITE.and(Flags::PAUSED))
    }

    pub(super) fn takes(&self, words: usize) -> bool {
        let words = i64::try_from(words).unwrap_or(i64::MAX);
        if self.arity < 0 {
            words >= -self.arity
        } else {
            words == self.arity
        }
    }
}

pub(super) const fn plain(
    name: &'static str,
    arity: i64,
    flags: Flags,
    run: fn(&mut Call) -> Outcome,
) -> Command {
    Command {
        name,
        arity,
        flags,
        run: Run::Plain(run),
    }
}

pub(super) const fn script(
    name: &'static str,
    arity: i64,
    flags: Flags,
    run: ScriptCommand,
) -> Command {
    Command {
        name,
        arity,
        flags,
        run: Run::Script(run),
    }
}

pub(super) const fn container(name: &'static str, subcommands: &'static [Command]) -> Command {
    Command {
        name,
        arity: -2,
        flags: Flags::READ,
        run: Run::Container(subcommands),
    }
}
