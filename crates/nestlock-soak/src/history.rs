//! What a process writes down: one `write(2)` a line, so that all of it survives SIGKILL but a line that was never begun.
//!
//! `TIME WHAT ..`, where the time is that of the event, not of the writing. What there is, and what it means:
//!
//! ```text
//! conf CLIENT WATCHDOG_MS LINK          a client; LINK is the number of its proxies, or `-`
//! call OP TASK WHO KIND LOCKS CLASS WAY LIMIT_MS LEASE_MS PARENT   an acquire begins
//! got OP OWNER TOKEN                    it returned with a guard
//! none OP, gone OP, err OP NAME TEXT    it returned without; it was dropped; it failed
//! ok OP REMAINING_US                    a look said "not lost"; the time is from before the look
//! lost OP, told OP                      a look said "lost"; `lost()` resolved
//! rel OP HOW                            unlock, drop, forget or leave begins
//! end OP RESULT                         that unlock returned
//! ext OP LEASE_MS, extended OP RESULT   an extension begins, and returns
//! count OP FOUND WANTED                 what the server says of this owner's holds
//! holder OP FOUND WANTED
//! put OP KEY TOKEN, done OP RESULT      a guarded write begins, and returns
//! take OP GIVEN TASK, taken OP RESULT   the release of what another task gave away
//! gap FROM, agap FROM                   nobody ran here from then until now: a thread, a task of the runtime
//! ```

use std::{
    fmt::Display,
    fs::{File, OpenOptions},
    io::{self, Write},
    path::Path,
};

use crate::clock::now;

#[derive(Debug)]
pub(crate) struct History(File);

impl History {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        Ok(Self(OpenOptions::new().append(true).create(true).open(path)?))
    }

    /// An event of now.
    pub(crate) fn write(&self, what: impl Display) {
        self.write_at(now(), what);
    }

    pub(crate) fn write_at(&self, time: u64, what: impl Display) {
        let line = format!("{time} {what}\n");
        (&self.0).write_all(line.as_bytes()).expect("the history is written");
    }
}

/// A word for a field: nothing in it that would end the field or the line.
pub(crate) fn word(text: &str) -> String {
    let clean: String = text.chars().map(|c| if c.is_whitespace() { '_' } else { c }).collect();
    if clean.is_empty() { "-".to_owned() } else { clean }
}
