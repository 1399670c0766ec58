//! Errors that a script raises or catches, and the reply for one that it does not catch.

use std::fmt;

use mlua::{Lua, LuaString, Value};

use super::{conversion::bytes, running::Running};
use crate::server::resp::{Text, double};

/// A Redis error that is passed through Lua.
#[derive(Debug)]
struct Raised(Text);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&String::from_utf8_lossy(&self.0.0))
    }
}

impl std::error::Error for Raised {}

pub(super) fn raise<T>(text: impl Into<Text>) -> mlua::Result<T> {
    Err(mlua::Error::external(Raised(text.into())))
}

/// Returns the text of a Redis error or an error table, without a position. Returns `None` for any
/// other value.
pub(super) fn plain_text(error: &Value) -> Option<Vec<u8>> {
    match error {
        Value::Error(error) => Some(match error.downcast_ref::<Raised>() {
            Some(Raised(text)) => text.0.to_vec(),
            None => format!("ERR {error}").into_bytes(),
        }),
        Value::Table(table) => table
            .raw_get::<Option<LuaString>>("err")
            .ok()
            .flatten()
            .map(|text| bytes(&text)),
        _ => None,
    }
}

/// Builds the reply for an uncaught error: its text, the script and the line.
pub(super) fn report(lua: &Lua, running: &Running, error: &Value) -> Vec<u8> {
    let mut text = plain_text(error).unwrap_or_else(|| match error {
        Value::String(text) => [b"ERR ", text.as_bytes().as_ref()].concat(),
        Value::Number(number) => format!("ERR {}", double(*number)).into_bytes(),
        Value::Integer(number) => format!("ERR {number}").into_bytes(),
        Value::Boolean(yes) => format!("ERR {yes}").into_bytes(),
        Value::Nil => b"ERR nil".to_vec(),
        other => format!("ERR ({} error object)", other.type_name()).into_bytes(),
    });
    // Redis cuts the text at a NUL before it appends the position
    text.truncate(
        text.iter()
            .position(|byte| *byte == 0)
            .unwrap_or(text.len()),
    );
    // level 0 is this handler; above the script are a function of `redis` or two of the prelude
    let line = (1..5).find_map(|level| {
        lua.inspect_stack(level, |frame| {
            let source = frame.source();
            let is_lua = source.what != "C" && source.source.as_deref() != Some("=nestlock");
            // a tail call leaves a frame without a line
            frame.current_line().filter(|_| is_lua)
        })
        .flatten()
    });
    let place = line.map_or_else(String::new, |line| format!(", on @user_script:{line}."));
    text.extend(format!(" script: {}{place}", running.sha.borrow()).bytes());
    text
}
