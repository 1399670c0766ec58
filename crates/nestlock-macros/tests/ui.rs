//! Checks the compile errors of wrong uses of `#[locked]`. The macro reports most of them. A stub
//! replaces the runtime crate, so that nothing else is built.

/// The rest of each message is the compiler's, and changes with its version. `TRYBUILD=overwrite`
/// rewrites the files.
#[rustversion::attr(not(stable(1.95)), ignore = "the files have the messages of Rust 1.95")]
#[test]
fn wrong_uses_are_reported_where_they_are() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
