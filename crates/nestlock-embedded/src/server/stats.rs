//! What INFO reports: how many connections, commands, expired keys and errors there were.

use std::collections::BTreeMap;

use super::resp::{Outcome, Text};

#[derive(Debug, Default)]
pub(crate) struct Calls {
    pub(crate) executed: u64,
    pub(crate) rejected: u64,
    pub(crate) failed: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Stats {
    pub(crate) connections: u64,
    pub(crate) commands: u64,
    pub(crate) expired: u64,
    pub(crate) calls: BTreeMap<&'static str, Calls>,
    pub(crate) errors: BTreeMap<String, u64>,
}

impl Stats {
    /// Counts a command that has been executed.
    pub(crate) fn count(&mut self, name: &'static str, outcome: &Outcome) {
        self.commands += 1;
        let calls = self.calls.entry(name).or_default();
        calls.executed += 1;
        if let Err(text) = outcome {
            calls.failed += 1;
            self.count_error(text);
        }
    }

    pub(crate) fn count_error(&mut self, text: &Text) {
        *self.errors.entry(text.code().into_owned()).or_default() += 1;
    }
}
