//! The same seed is the same run, to the last step of every thread.

use std::process::Command;

/// The checksum of a few seeds of a kind.
fn run(kind: &str) -> String {
    let mut program = Command::new(env!("CARGO_BIN_EXE_nestlock-sim"));
    let output = program
        .args([&format!("kind={kind}"), "seeds=4", "seconds=30"])
        .output()
        .expect("the simulator runs");
    let text = String::from_utf8(output.stdout).expect("text");
    assert!(
        output.status.success(),
        "{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    text.lines()
        .find_map(|line| line.split("sum ").nth(1))
        .expect("a sum")
        .to_owned()
}

#[test]
fn the_same_seeds_have_the_same_sum() {
    for kind in ["reentrant", "fair", "read_write", "signal", "multi", "red3"] {
        let sum = run(kind);
        assert_eq!(run(kind), sum, "{kind}");
    }
    assert_ne!(run("reentrant"), run("fair"));
}
