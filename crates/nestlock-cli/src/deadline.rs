//! The time until which the command may run. nestlock writes it, and the guards enforce it while
//! nestlock is suspended.

use std::{
    fs::File,
    io,
    os::{fd::AsFd, unix::fs::FileExt},
    time::{Duration, Instant},
};

use nix::{sys::time::TimeValLike, time::ClockId};

/// A clock that keeps running while the machine is suspended, as the server's does.
#[cfg(target_os = "linux")]
const CLOCK: ClockId = ClockId::CLOCK_BOOTTIME;
#[cfg(not(target_os = "linux"))]
const CLOCK: ClockId = ClockId::CLOCK_MONOTONIC;

/// An unnamed file of 8 bytes: the last value counts, however late it is read.
#[derive(Debug)]
pub(crate) struct Deadline(File);

impl Deadline {
    pub(crate) fn new(at: Instant) -> io::Result<Self> {
        let deadline = Self(nameless()?);
        deadline.set(at)?;
        Ok(deadline)
    }

    /// Wraps the file that another process has created.
    pub(crate) fn of(file: File) -> Self {
        Self(file)
    }

    pub(crate) fn set(&self, at: Instant) -> io::Result<()> {
        // an `Instant` has no meaning in another process, but the kernel's clock has
        let at = now()?.saturating_add(at.saturating_duration_since(Instant::now()));
        self.0.write_all_at(
            &u64::try_from(at.as_nanos())
                .unwrap_or(u64::MAX)
                .to_le_bytes(),
            0,
        )
    }

    /// Returns the time that is left until the deadline.
    pub(crate) fn left(&self) -> io::Result<Duration> {
        let mut bytes = [0; 8];
        self.0.read_exact_at(&mut bytes, 0)?;
        Ok(Duration::from_nanos(u64::from_le_bytes(bytes)).saturating_sub(now()?))
    }

    pub(crate) fn file(&self) -> impl AsFd + '_ {
        &self.0
    }
}

fn now() -> io::Result<Duration> {
    let nanoseconds = CLOCK.now()?.num_nanoseconds();
    Ok(Duration::from_nanos(
        u64::try_from(nanoseconds).unwrap_or_default(),
    ))
}

#[cfg(target_os = "linux")]
fn nameless() -> io::Result<File> {
    use nix::sys::memfd::{MFdFlags, memfd_create};
    Ok(memfd_create("nestlock-deadline", MFdFlags::MFD_CLOEXEC)?.into())
}

#[cfg(not(target_os = "linux"))]
fn nameless() -> io::Result<File> {
    let path = std::env::temp_dir().join(format!("nestlock-deadline-{}", std::process::id()));
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)?;
    std::fs::remove_file(path)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_word_counts_and_what_is_over_has_nothing_left() {
        let deadline = Deadline::new(Instant::now()).unwrap();
        assert_eq!(deadline.left().unwrap(), Duration::ZERO);
        let minute = Duration::from_secs(60);
        deadline.set(Instant::now() + minute).unwrap();
        let left = deadline.left().unwrap();
        assert!(left <= minute && left > minute / 2, "{left:?}");
        deadline.set(Instant::now()).unwrap();
        assert_eq!(deadline.left().unwrap(), Duration::ZERO);
    }
}
