//! Writes lines to standard error. A reader that stops reading must not block anything, least of
//! all the end of a command that lost its lock.

use std::{
    fmt,
    io::{self, Write},
    sync::{
        OnceLock,
        mpsc::{Sender, channel},
    },
    thread,
    time::Duration,
};

use nix::sys::signal::SigSet;

/// How long the end of the program waits for the last line to be written.
const LAST: Duration = Duration::from_secs(1);

enum Line {
    Text(String),
    /// Reports that all lines before it are written.
    Last(Sender<()>),
}

/// Sends lines to the thread that writes them. `None`: that thread could not start.
static LINES: OnceLock<Option<Sender<Line>>> = OnceLock::new();

/// Writes a line, without waiting until it is written.
pub(crate) fn warn(line: impl fmt::Display) {
    let text = format!("nestlock: {line}\n");
    match LINES.get_or_init(begin) {
        Some(lines) => drop(lines.send(Line::Text(text))),
        None => write(&text),
    }
}

/// Waits a moment for the lines that are not written yet.
pub(crate) fn finish() {
    let Some(Some(lines)) = LINES.get() else {
        return;
    };
    let (written, all) = channel();
    if lines.send(Line::Last(written)).is_ok() {
        let _ = all.recv_timeout(LAST);
    }
}

fn begin() -> Option<Sender<Line>> {
    let (lines, queued) = channel();
    let write_all = move || {
        // a background job that writes to its terminal may be stopped as a whole, unless the signal
        // for that is blocked
        let _ = SigSet::all().thread_block();
        for line in queued {
            match line {
                Line::Text(text) => write(&text),
                Line::Last(written) => drop(written.send(())),
            }
        }
    };
    thread::Builder::new().spawn(write_all).ok().map(|_| lines)
}

/// Writes the text in one piece, as other processes may write there too.
fn write(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}
