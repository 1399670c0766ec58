//! The Lua table `redis`: the functions and constants that scripts use.

use std::{cell::RefCell, rc::Rc};

use mlua::{Lua, MultiValue, Table, Value};
use sha1::{Digest, Sha1};

use super::{
    conversion::{argument, bytes, error_table, number, to_lua},
    raised::raise,
    running::Running,
};
use crate::server::{
    commands::{self, Run, Unfit},
    resp::{Outcome, Protocol},
    state::Server,
};

const WRONG_ARGUMENTS: &[u8] = b"ERR wrong number or type of arguments";

/// Builds the Lua table `redis`.
pub(super) fn library(
    lua: &Lua,
    server: &Rc<RefCell<Server>>,
    running: &Rc<Running>,
) -> mlua::Result<Table> {
    let redis = lua.create_table()?;
    let call = |catches: bool| {
        let (server, running) = (Rc::clone(server), Rc::clone(running));
        lua.create_function(move |lua, args: MultiValue| {
            let outcome = call_command(&server, &running, &args);
            match outcome {
                Err(text) if catches => error_table(lua, &text.0),
                Err(text) => raise(text),
                Ok(reply) => to_lua(lua, &reply, running.protocol.get()),
            }
        })
    };
    redis.raw_set("call", call(false)?)?;
    redis.raw_set("pcall", call(true)?)?;
    add_replies(lua, &redis)?;
    add_settings(lua, &redis, running)?;
    Ok(redis)
}

/// Adds the functions that create replies.
fn add_replies(lua: &Lua, redis: &Table) -> mlua::Result<()> {
    let single = |args: &MultiValue| match args.as_slices() {
        ([Value::String(text)], _) if args.len() == 1 => Some(bytes(text)),
        _ => None,
    };
    redis.raw_set(
        "error_reply",
        lua.create_function(move |lua, args: MultiValue| {
            let Some(text) = single(&args) else {
                return error_table(lua, WRONG_ARGUMENTS);
            };
            let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
            let text = text.strip_prefix(b"-").unwrap_or(text);
            // the error code and its message
            let (code, text) = match text.iter().position(|byte| *byte == b' ') {
                Some(at) => (&text[..at], &text[at + 1..]),
                None => (&b"ERR"[..], text),
            };
            error_table(lua, &[code, b" ", without_line_ends(text)].concat())
        })?,
    )?;
    redis.raw_set(
        "status_reply",
        lua.create_function(move |lua, args: MultiValue| {
            let Some(text) = single(&args) else {
                return error_table(lua, WRONG_ARGUMENTS);
            };
            let table = lua.create_table()?;
            table.raw_set("ok", lua.create_string(text)?)?;
            Ok(Value::Table(table))
        })?,
    )?;
    Ok(())
}

fn without_line_ends(text: &[u8]) -> &[u8] {
    let is_end = |byte: &u8| b"\r\n".contains(byte);
    let start = text
        .iter()
        .position(|byte| !is_end(byte))
        .unwrap_or(text.len());
    let end = text
        .iter()
        .rposition(|byte| !is_end(byte))
        .map_or(start, |last| last + 1);
    &text[start..end]
}

/// Adds the functions and constants that neither call commands nor create replies.
fn add_settings(lua: &Lua, redis: &Table, running: &Rc<Running>) -> mlua::Result<()> {
    redis.raw_set(
        "sha1hex",
        lua.create_function(|_, args: MultiValue| {
            if args.len() != 1 {
                return raise("ERR wrong number of arguments");
            }
            let bytes = argument(&args[0]).unwrap_or_default();
            Ok(Sha1::digest(bytes)
                .iter()
                .fold(String::new(), |text, byte| text + &format!("{byte:02x}")))
        })?,
    )?;
    redis.raw_set(
        "log",
        lua.create_function(|_, args: MultiValue| {
            if args.len() < 2 {
                return raise("ERR redis.log() requires two arguments or more.");
            }
            match number(&args[0]) {
                Some(level) if (0.0..4.0).contains(&level) => Ok(()),
                Some(_) => raise("ERR Invalid debug level."),
                None => raise("ERR First argument must be a number (log level)."),
            }
        })?,
    )?;
    let state = Rc::clone(running);
    redis.raw_set(
        "setresp",
        lua.create_function(move |_, args: MultiValue| {
            if args.len() != 1 {
                return raise("ERR redis.setresp() requires one argument.");
            }
            state.protocol.set(match number(&args[0]) {
                Some(2.0) => Protocol::Resp2,
                Some(3.0) => Protocol::Resp3,
                _ => return raise("ERR RESP version must be 2 or 3."),
            });
            Ok(())
        })?,
    )?;
    // there is no replication: these functions do nothing
    redis.raw_set("replicate_commands", lua.create_function(|_, ()| Ok(true))?)?;
    redis.raw_set(
        "set_repl",
        lua.create_function(|_, args: MultiValue| {
            if args.len() != 1 {
                return raise("ERR redis.set_repl() requires one argument.");
            }
            match number(&args[0]) {
                Some(flags) if (0.0..4.0).contains(&flags) => Ok(()),
                _ => raise("ERR Invalid replication flags. Use REPL_AOF, REPL_REPLICA, REPL_ALL or REPL_NONE."),
            }
        })?,
    )?;
    redis.raw_set("breakpoint", lua.create_function(|_, ()| Ok(false))?)?;
    for (name, value) in [
        ("LOG_DEBUG", 0),
        ("LOG_VERBOSE", 1),
        ("LOG_NOTICE", 2),
        ("LOG_WARNING", 3),
        ("REPL_NONE", 0),
        ("REPL_AOF", 1),
        ("REPL_SLAVE", 2),
        ("REPL_REPLICA", 2),
        ("REPL_ALL", 3),
        ("REDIS_VERSION_NUM", 0x0007_000f),
    ] {
        redis.raw_set(name, value)?;
    }
    redis.raw_set("REDIS_VERSION", "7.0.15")
}

/// Runs the command of a `redis.call` or `redis.pcall`.
fn call_command(server: &RefCell<Server>, running: &Running, args: &MultiValue) -> Outcome {
    if args.is_empty() {
        return Err("ERR Please specify at least one argument for this redis lib call".into());
    }
    let words: Option<Vec<Vec<u8>>> = args.iter().map(argument).collect();
    let words = words.ok_or("ERR Lua redis lib command arguments must be strings or integers")?;
    let command = commands::find(&words).map_err(|unfit| match unfit {
        Unfit::Unknown(_) => "ERR Unknown Redis command called from script",
        Unfit::Arity(_) => "ERR Wrong number of args calling Redis command from script",
    })?;
    if !command.is_for_scripts() {
        return Err("ERR This Redis command is not allowed from script".into());
    }
    if running.read_only.get() && command.waits_for_writes() {
        return Err("ERR Write commands are not allowed from read-only scripts.".into());
    }
    let Run::Plain(run) = command.run else {
        return Err("ERR This Redis command is not allowed from script".into());
    };
    let mut server = server.borrow_mut();
    let (client, mut db) = (running.client.get(), running.db.get());
    server.feed_monitors(client, db, true, &words);
    let outcome = commands::run(
        &mut server,
        client,
        &mut db,
        &words,
        (command.name, run),
        (true, running.protocol.get()),
    );
    running.db.set(db);
    outcome
}
