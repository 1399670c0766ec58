//! What the compiler says about `#[locked]` that is used in a wrong way. The macro says most of it; a stub stands for the crate
//! that has the run time, so that nothing else is built.

/// The rest of each message is the compiler's, and changes with it. `TRYBUILD=overwrite` writes the files anew.
#[rustversion::attr(not(stable(1.95)), ignore = "the files have the words of Rust 1.95")]
#[test]
fn wrong_uses_are_told_where_they_are() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
