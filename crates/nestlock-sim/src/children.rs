//! The processes that run a seed each: where they run, and what they cost.

use std::{os::unix::process::CommandExt as _, process::Command};

/// Pins a child to one processor. Its threads run one at a time, and a thread that wakes on another
/// processor starts late.
pub(crate) fn pin(child: &mut Command, job: usize) {
    let pin = move || {
        // SAFETY: a set of processors is plain data
        unsafe {
            let mut all: libc::cpu_set_t = std::mem::zeroed();
            libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut all);
            let ours: Vec<usize> = (0..1024)
                .filter(|cpu| libc::CPU_ISSET(*cpu, &all))
                .collect();
            let mut one: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(ours[job % ours.len()], &mut one);
            libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const one);
        }
        Ok(())
    };
    // SAFETY: the hook makes system calls and allocates a small list, in the fork of a program
    // whose other threads only wait for their children
    unsafe { child.pre_exec(pin) };
}

/// Returns the processor time of all children that have ended, in seconds.
pub(crate) fn spent_by_children() -> f64 {
    // SAFETY: plain data, which the call fills in
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}
