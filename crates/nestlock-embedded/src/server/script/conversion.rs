//! Conversions between the values of Lua and the words and replies of commands.

use mlua::{Lua, LuaString, Value};

use crate::server::resp::{Outcome, Protocol, Reply, Text, double};

pub(super) fn bytes(text: &LuaString) -> Vec<u8> {
    text.as_bytes().to_vec()
}

/// Converts an integer to a Lua 5.1 number, a double. Above 2^53 it loses its last digits.
#[allow(clippy::cast_precision_loss)]
fn float(number: i64) -> f64 {
    number as f64
}

pub(super) fn number(value: &Value) -> Option<f64> {
    value.as_number().or_else(|| value.as_integer().map(float))
}

/// Converts a Lua value to a word of a command. Returns `None` if it is neither a string nor a
/// number.
pub(super) fn argument(value: &Value) -> Option<Vec<u8>> {
    match value {
        Value::String(text) => Some(text.as_bytes().to_vec()),
        other => number(other).map(|number| double(number).into_bytes()),
    }
}

pub(super) fn error_table(lua: &Lua, text: &[u8]) -> mlua::Result<Value> {
    let table = lua.create_table()?;
    table.raw_set("err", lua.create_string(text)?)?;
    Ok(Value::Table(table))
}

/// Converts a command's reply to the Lua value that the script sees.
pub(super) fn to_lua(lua: &Lua, reply: &Reply, protocol: Protocol) -> mlua::Result<Value> {
    let three = protocol == Protocol::Resp3;
    let string = |bytes: &[u8]| lua.create_string(bytes).map(Value::String);
    let list = |items: &[Reply]| {
        let table = lua.create_table_with_capacity(items.len(), 0)?;
        for (at, item) in items.iter().enumerate() {
            table.raw_set(at + 1, to_lua(lua, item, protocol)?)?;
        }
        Ok(table)
    };
    let single = |name: &str, value: Value| {
        let table = lua.create_table()?;
        table.raw_set(name, value)?;
        Ok(Value::Table(table))
    };
    match reply {
        Reply::Status(text) => single("ok", string(&text.0)?),
        Reply::Error(text) => error_table(lua, &text.0),
        Reply::Int(number) => Ok(Value::Number(float(*number))),
        Reply::Bulk(bytes) => string(bytes),
        Reply::Nil | Reply::NilList | Reply::Nothing => Ok(if three {
            Value::Nil
        } else {
            Value::Boolean(false)
        }),
        Reply::Set(items) if three => {
            let members = lua.create_table()?;
            for item in items {
                members.raw_set(to_lua(lua, item, protocol)?, true)?;
            }
            single("set", Value::Table(members))
        }
        Reply::List(items) | Reply::Push(items) | Reply::Set(items) => {
            list(items).map(Value::Table)
        }
        Reply::Map(pairs) if three => {
            let map = lua.create_table()?;
            for (key, value) in pairs {
                map.raw_set(to_lua(lua, key, protocol)?, to_lua(lua, value, protocol)?)?;
            }
            single("map", Value::Table(map))
        }
        Reply::Map(pairs) => {
            let table = lua.create_table_with_capacity(pairs.len() * 2, 0)?;
            for (at, (key, value)) in pairs.iter().enumerate() {
                table.raw_set(at * 2 + 1, to_lua(lua, key, protocol)?)?;
                table.raw_set(at * 2 + 2, to_lua(lua, value, protocol)?)?;
            }
            Ok(Value::Table(table))
        }
        Reply::Double(number) if three => single("double", Value::Number(*number)),
        Reply::Double(number) => string(double(*number).as_bytes()),
        Reply::Bool(yes) if three => Ok(Value::Boolean(*yes)),
        Reply::Bool(yes) => Ok(Value::Number(f64::from(u8::from(*yes)))),
        Reply::BigNumber(digits) if three => single("big_number", string(digits)?),
        Reply::BigNumber(digits) => string(digits),
        Reply::Verbatim(text) if three => {
            let verbatim = lua.create_table()?;
            verbatim.raw_set("format", "txt")?;
            verbatim.raw_set("string", string(text)?)?;
            single("verbatim_string", Value::Table(verbatim))
        }
        Reply::Verbatim(text) => string(text),
    }
}

/// Converts the return value of a script to a reply.
pub(super) fn from_lua(value: &Value, protocol: Protocol, depth: usize) -> Outcome {
    if depth == 0 {
        return Ok(Reply::Error("ERR reached lua stack limit".into()));
    }
    let nested = |value: &Value| from_lua(value, protocol, depth - 1);
    Ok(match value {
        Value::String(text) => Reply::bulk(text.as_bytes().to_vec()),
        Value::Integer(number) => Reply::Int(*number),
        Value::Number(number) => Reply::Int(truncated(*number)),
        Value::Boolean(yes) if protocol == Protocol::Resp3 => Reply::Bool(*yes),
        Value::Boolean(true) => Reply::Int(1),
        Value::Table(table) => {
            let field = |name: &str| table.raw_get::<Value>(name).unwrap_or(Value::Nil);
            let text = |name: &str| field(name).as_string().map(bytes);
            if let Some(text) = text("err") {
                Reply::Error(Text::until_nul(&text))
            } else if let Some(text) = text("ok") {
                Reply::Status(Text::until_nul(&text))
            } else if let Some(number) = number(&field("double")) {
                Reply::Double(number)
            } else if let Value::Table(map) = field("map") {
                let pairs = map.pairs::<Value, Value>().flatten();
                Reply::Map(
                    pairs
                        .map(|(key, value)| Ok((nested(&key)?, nested(&value)?)))
                        .collect::<Result<_, Text>>()?,
                )
            } else if let Value::Table(set) = field("set") {
                let members = set.pairs::<Value, Value>().flatten();
                Reply::Set(
                    members
                        .map(|(key, _)| nested(&key))
                        .collect::<Result<_, _>>()?,
                )
            } else if let Some(digits) = field("big_number").as_string() {
                Reply::BigNumber(
                    digits
                        .as_bytes()
                        .iter()
                        .map(|byte| if b"\r\n".contains(byte) { b' ' } else { *byte })
                        .collect(),
                )
            } else if let Value::Table(verbatim) = field("verbatim_string")
                && let Ok(Value::String(text)) = verbatim.raw_get("string")
            {
                Reply::Verbatim(text.as_bytes().to_vec())
            } else {
                let items = (1..).map_while(|at: usize| {
                    table
                        .raw_get::<Value>(at)
                        .ok()
                        .filter(|item| !item.is_nil())
                });
                Reply::List(items.map(|item| nested(&item)).collect::<Result<_, _>>()?)
            }
        }
        _ => Reply::Nil,
    })
}

/// Converts a number to an integer as C does: NaN and out-of-range numbers above give `i64::MIN`.
fn truncated(number: f64) -> i64 {
    if number.is_nan() || number >= 9_223_372_036_854_775_808.0 {
        i64::MIN
    } else {
        number as i64
    }
}
