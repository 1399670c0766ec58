//! Lua scripts: PUC Lua 5.1 with the environment and the conversions of Redis 7.0.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    fmt::{self, Write as _},
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use mlua::{
    Function, HookTriggers, Lua, LuaOptions, LuaString, MultiValue, StdLib, Table, Value, VmState,
    chunk::ChunkMode,
};
use sha1::{Digest, Sha1};

use super::{
    Server,
    commands::{self, Outcome, Run, ScriptCommand, Unfit},
    resp::{Protocol, Reply, Text, double, integer},
};

/// The Lua code that builds the environment of scripts, from functions implemented in Rust.
const PRELUDE: &str = include_str!("prelude.lua");
const WRONG_ARGUMENTS: &[u8] = b"ERR wrong number or type of arguments";
const NO_SCRIPT: &str = "NOSCRIPT No matching script. Please use EVAL.";
/// How many Lua instructions run between two checks for a shutdown of the server.
const HOOK_INTERVAL: u32 = 1_000_000;
/// How deep a reply may nest. Redis stops at the end of its Lua stack, which is deeper.
const MAX_DEPTH: usize = 200;

/// The context of the running script: its client, its database and what it may do.
#[derive(Debug)]
struct Running {
    client: Cell<u64>,
    db: Cell<usize>,
    read_only: Cell<bool>,
    protocol: Cell<Protocol>,
    sha: RefCell<String>,
}

/// A Redis error that is passed through Lua.
#[derive(Debug)]
struct Raised(Text);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&String::from_utf8_lossy(&self.0.0))
    }
}

impl std::error::Error for Raised {}

fn raise<T>(text: impl Into<Text>) -> mlua::Result<T> {
    Err(mlua::Error::external(Raised(text.into())))
}

/// All scripts of a server, and the Lua state that runs them.
pub(crate) struct Scripts {
    lua: Lua,
    running: Rc<Running>,
    cache: RefCell<HashMap<String, Function>>,
    /// Lua's own `loadstring`: its error messages keep arbitrary bytes, mlua's do not.
    loadstring: Function,
    /// Sets KEYS and ARGV, and calls a script.
    enter: Function,
}

impl fmt::Debug for Scripts {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("Scripts")
            .field("cached", &self.cache.borrow().len())
            .finish_non_exhaustive()
    }
}

impl Scripts {
    pub(crate) fn new(server: &Rc<RefCell<Server>>, stop: Arc<AtomicBool>) -> Result<Self, String> {
        Self::build(server, stop).map_err(|error| error.to_string())
    }

    fn build(server: &Rc<RefCell<Server>>, stop: Arc<AtomicBool>) -> mlua::Result<Self> {
        let libs = StdLib::TABLE | StdLib::STRING | StdLib::MATH;
        let lua = Lua::new_with(libs, LuaOptions::new().catch_rust_panics(false))?;
        lua.set_hook(
            HookTriggers::new().every_nth_instruction(HOOK_INTERVAL),
            move |_, _| {
                if stop.load(Ordering::Relaxed) {
                    raise("ERR the server ends")
                } else {
                    Ok(VmState::Continue)
                }
            },
        )?;
        let running = Rc::new(Running {
            client: Cell::new(0),
            db: Cell::new(0),
            read_only: Cell::new(false),
            protocol: Cell::new(Protocol::Resp2),
            sha: RefCell::default(),
        });
        let redis = api(&lua, server, &running)?;
        let handler = {
            let running = Rc::clone(&running);
            lua.create_function(move |lua, error: Value| {
                lua.create_string(report(lua, &running, &error))
            })?
        };
        let text = lua.create_function(|lua, error: Value| {
            plain_text(&error)
                .map(|text| lua.create_string(text))
                .transpose()
        })?;
        let loadstring = lua.globals().raw_get("loadstring")?;
        let enter = lua
            .load(PRELUDE)
            .set_name("=nestlock")
            .call::<Function>((redis, handler, text))?;
        Ok(Self {
            lua,
            running,
            cache: RefCell::default(),
            loadstring,
            enter,
        })
    }

    pub(crate) fn execute(
        &self,
        which: ScriptCommand,
        client: u64,
        db: usize,
        args: &[Vec<u8>],
    ) -> Outcome {
        match which {
            ScriptCommand::Eval | ScriptCommand::EvalRo => {
                let keys = count_keys(args)?;
                let sha = self.load(&args[1])?;
                self.run(
                    &sha,
                    client,
                    db,
                    (&args[3..3 + keys], &args[3 + keys..]),
                    which == ScriptCommand::EvalRo,
                )
            }
            ScriptCommand::EvalSha | ScriptCommand::EvalShaRo => {
                if args[1].len() != 40 {
                    return Err(NO_SCRIPT.into());
                }
                let keys = count_keys(args)?;
                let sha = String::from_utf8_lossy(&args[1]).to_ascii_lowercase();
                self.run(
                    &sha,
                    client,
                    db,
                    (&args[3..3 + keys], &args[3 + keys..]),
                    which == ScriptCommand::EvalShaRo,
                )
            }
            ScriptCommand::Load => self.load(&args[2]).map(Reply::bulk),
            ScriptCommand::Exists => {
                let cache = self.cache.borrow();
                let known = |sha: &Vec<u8>| {
                    cache.contains_key(&String::from_utf8_lossy(sha).to_ascii_lowercase())
                };
                Ok(Reply::list(
                    args[2..].iter().map(|sha| Reply::Int(known(sha).into())),
                ))
            }
            ScriptCommand::Flush => {
                let known = |word: &Vec<u8>| {
                    word.eq_ignore_ascii_case(b"sync") || word.eq_ignore_ascii_case(b"async")
                };
                if args.len() > 3 || !args[2..].iter().all(known) {
                    return Err("ERR SCRIPT FLUSH only support SYNC|ASYNC option".into());
                }
                self.cache.borrow_mut().clear();
                Ok(Reply::OK)
            }
            // a script runs to its end before the server reads another request
            ScriptCommand::Kill => Err("NOTBUSY No scripts in execution right now.".into()),
        }
    }

    /// Compiles a script, unless it is cached. Returns its SHA1 in hexadecimal.
    fn load(&self, source: &[u8]) -> Result<String, Text> {
        let mut sha = String::with_capacity(40);
        for byte in Sha1::digest(source) {
            let _ = write!(sha, "{byte:02x}");
        }
        if !self.cache.borrow().contains_key(&sha) {
            let chunk = self
                .lua
                .load(source)
                .set_name("@user_script")
                .set_mode(ChunkMode::Text);
            let function = chunk.into_function().map_err(|error| {
                let text = self
                    .what_is_wrong(source)
                    .unwrap_or_else(|| error.to_string().into_bytes());
                Text::until_nul(
                    &[&b"ERR Error compiling script (new function): "[..], &text].concat(),
                )
            })?;
            self.cache.borrow_mut().insert(sha.clone(), function);
        }
        Ok(sha)
    }

    /// Returns Lua's error message for a script that does not compile.
    fn what_is_wrong(&self, source: &[u8]) -> Option<Vec<u8>> {
        // `loadstring` would load this as bytecode, which it trusts
        if source.starts_with(b"\x1b") {
            return Some(b"user_script:1: unexpected symbol near 'char(27)'".to_vec());
        }
        let source = self.lua.create_string(source).ok()?;
        let result: (Value, Option<LuaString>) =
            self.loadstring.call((source, "@user_script")).ok()?;
        result.1.map(|text| bytes(&text))
    }

    fn run(
        &self,
        sha: &str,
        client: u64,
        db: usize,
        (keys, argv): (&[Vec<u8>], &[Vec<u8>]),
        read_only: bool,
    ) -> Outcome {
        let function = self.cache.borrow().get(sha).cloned();
        let function = function.ok_or(NO_SCRIPT)?;
        self.running.client.set(client);
        self.running.db.set(db);
        self.running.read_only.set(read_only);
        self.running.protocol.set(Protocol::Resp2);
        sha.clone_into(&mut self.running.sha.borrow_mut());
        // SELECT in a script ends with the script: `running.db` is not copied back to the client
        let internal = |error: mlua::Error| format!("ERR {error}");
        let strings = |words: &[Vec<u8>]| {
            let words = words.iter().map(|word| self.lua.create_string(word));
            self.lua
                .create_sequence_from(words.collect::<mlua::Result<Vec<_>>>()?)
        };
        let (keys, argv) = (
            strings(keys).map_err(internal)?,
            strings(argv).map_err(internal)?,
        );
        let (ok, result): (bool, Value) =
            self.enter.call((function, keys, argv)).map_err(internal)?;
        if !ok {
            return Err(Text::until_nul(
                &result.as_string().map_or_else(Vec::new, bytes),
            ));
        }
        match from_lua(&result, self.running.protocol.get(), MAX_DEPTH) {
            Ok(Reply::Error(text)) => Err(text),
            other => other,
        }
    }
}

fn count_keys(args: &[Vec<u8>]) -> Result<usize, Text> {
    let keys = integer(&args[2]).ok_or(commands::NOT_AN_INTEGER)?;
    if keys > i64::try_from(args.len() - 3).unwrap_or(i64::MAX) {
        return Err("ERR Number of keys can't be greater than number of args".into());
    }
    usize::try_from(keys).map_err(|_| "ERR Number of keys can't be negative".into())
}

fn bytes(text: &LuaString) -> Vec<u8> {
    text.as_bytes().to_vec()
}

/// Returns the text of a Redis error or an error table, without a position. Returns `None` for any
/// other value.
fn plain_text(error: &Value) -> Option<Vec<u8>> {
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
fn report(lua: &Lua, running: &Running, error: &Value) -> Vec<u8> {
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

/// Builds the Lua table `redis`.
fn api(lua: &Lua, server: &Rc<RefCell<Server>>, running: &Rc<Running>) -> mlua::Result<Table> {
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

/// Converts an integer to a Lua 5.1 number, a double. Above 2^53 it loses its last digits.
#[allow(clippy::cast_precision_loss)]
fn float(number: i64) -> f64 {
    number as f64
}

fn number(value: &Value) -> Option<f64> {
    value.as_number().or_else(|| value.as_integer().map(float))
}

/// Converts a Lua value to a word of a command. Returns `None` if it is neither a string nor a
/// number.
fn argument(value: &Value) -> Option<Vec<u8>> {
    match value {
        Value::String(text) => Some(text.as_bytes().to_vec()),
        other => number(other).map(|number| double(number).into_bytes()),
    }
}

fn error_table(lua: &Lua, text: &[u8]) -> mlua::Result<Value> {
    let table = lua.create_table()?;
    table.raw_set("err", lua.create_string(text)?)?;
    Ok(Value::Table(table))
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
    let outcome = server.run(
        client,
        &mut db,
        &words,
        (command, run),
        (true, running.protocol.get()),
    );
    running.db.set(db);
    outcome
}

/// Converts a command's reply to the Lua value that the script sees.
fn to_lua(lua: &Lua, reply: &Reply, protocol: Protocol) -> mlua::Result<Value> {
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
fn from_lua(value: &Value, protocol: Protocol, depth: usize) -> Outcome {
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
