//! The texts of errors that several commands reply with, and how a text quotes words of a client.

use crate::server::resp::Text;

pub(super) const WRONG_TYPE: &str =
    "WRONGTYPE Operation against a key holding the wrong kind of value";
pub(crate) const SYNTAX: &str = "ERR syntax error";
pub(crate) const NOT_AN_INTEGER: &str = "ERR value is not an integer or out of range";
pub(super) const NOT_A_FLOAT: &str = "ERR value is not a valid float";
pub(super) const NOT_POSITIVE: &str = "ERR value is out of range, must be positive";
pub(super) const OVERFLOW: &str = "ERR increment or decrement would overflow";

pub(super) fn wrong_number(name: &str) -> String {
    format!("ERR wrong number of arguments for '{name}' command")
}

/// Builds an error text that quotes words of a client.
pub(super) fn text<const N: usize>(parts: [&[u8]; N]) -> Text {
    Text(parts.concat().into())
}

/// Truncates a word at its first NUL, as C prints a string, and to `len` bytes.
pub(super) fn shortened(word: &[u8], len: usize) -> &[u8] {
    let word = word.split(|byte| *byte == 0).next().unwrap_or_default();
    &word[..word.len().min(len)]
}

pub(super) fn invalid_expire(command: &str) -> String {
    format!("ERR invalid expire time in '{command}' command")
}
