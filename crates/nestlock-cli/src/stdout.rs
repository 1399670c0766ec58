//! Writes lines to standard output.

use std::{
    fmt::Display,
    io::{self, ErrorKind, Write},
    process,
};

use nix::sys::signal::Signal;

use crate::{failure::FAILED, stderr};

/// Prints a line. Ends the program if that fails, for example because the reader has closed the
/// pipe.
pub(crate) fn say(line: impl Display) {
    if let Err(error) = writeln!(io::stdout(), "{line}") {
        if error.kind() == ErrorKind::BrokenPipe {
            // the exit code of a program that the signal has ended
            stderr::finish();
            process::exit(128 + Signal::SIGPIPE as i32);
        }
        stderr::warn(format_args!("cannot write: {error}"));
        stderr::finish();
        process::exit(FAILED.into());
    }
}
