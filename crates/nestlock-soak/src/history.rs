//! The history of a process. Each line is one `write(2)`, so after SIGKILL only a line that was
//! never begun can be missing.
//!
//! A line is `TIME WHAT ..`, with the time of the event, not of the writing:
//!
//! ```text
//! conf CLIENT WATCHDOG_MS LINK          a client; LINK is the number of its proxies, or `-`
//! call OP TASK WHO KIND LOCKS CLASS WAY LIMIT_MS LEASE_MS PARENT   an acquire begins
//! trip OP ROUND_TRIP_US                 the longest round trip that its client knew of during it
//! got OP OWNER TOKEN                    it returned a guard
//! none OP, gone OP, err OP NAME TEXT    it returned no guard; it was dropped; it failed
//! ok OP REMAINING_US                    a check found it held; the time is from before the check
//! lost OP, told OP                      a check found it lost; `lost()` resolved
//! rel OP HOW                            unlock, cut (dropped unlock), drop or leave
//! end OP RESULT                         that unlock returned
//! ext OP LEASE_MS, extended OP RESULT   an extension begins, and returns
//! count OP FOUND WANTED                 the owner's hold count on the server
//! holder OP FOUND WANTED                the lock's holder on the server
//! put OP KEY TOKEN, done OP RESULT      a guarded write begins, and returns
//! take OP GIVEN TASK, taken OP RESULT   the release of a hold that another task left
//! gap FROM, agap FROM                   no thread, or no runtime task, ran since FROM
//! sgapN FROM                            server N has not replied since FROM
//! ```

use std::{
    fmt::Display,
    fs::{File, OpenOptions},
    io::{self, Write},
    path::Path,
};

use crate::clock::now;

/// The journal of the faults, in a run's folder: written as a history, with lines of its own.
pub(crate) const JOURNAL: &str = "faults";

#[derive(Debug)]
pub(crate) struct History(File);

impl History {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        Ok(Self(
            OpenOptions::new().append(true).create(true).open(path)?,
        ))
    }

    /// Writes an event that happens now.
    pub(crate) fn write(&self, what: impl Display) {
        self.write_at(now(), what);
    }

    pub(crate) fn write_at(&self, time: u64, what: impl Display) {
        let line = format!("{time} {what}\n");
        (&self.0)
            .write_all(line.as_bytes())
            .expect("the history is written");
    }
}

/// Makes a word for a field: without blanks, which would end the field or the line, and not empty.
pub(crate) fn word(text: &str) -> String {
    let clean: String = text
        .chars()
        .map(|c| if c.is_whitespace() { '_' } else { c })
        .collect();
    if clean.is_empty() {
        "-".to_owned()
    } else {
        clean
    }
}
