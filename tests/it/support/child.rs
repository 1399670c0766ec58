//! Child processes of tests, and signals to them.

use std::process::Command;

/// Sends a signal to a process that the test started.
pub fn signal(pid: u32, signal: i32) {
    let status = Command::new("kill").arg(format!("-{signal}")).arg(pid.to_string()).status().expect("kill(1)");
    assert!(status.success(), "kill -{signal} {pid}");
}
