//! Lua scripts: PUC Lua 5.1 with the environment and the conversions of Redis 7.0.
//!
//! `redis.call` raises a Rust error, which `pcall` turns into its text: in Redis 7.0, too, a script
//! that catches it gets a string. To raise a table would need a Lua function in between, and its
//! line would be lost. The environment is a proxy in front of the real globals: Lua 5.1 has no
//! read-only tables, and Redis has patched it.

mod conversion;
mod library;
mod raised;
mod running;

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
    Function, HookTriggers, Lua, LuaOptions, LuaString, StdLib, Value, VmState, chunk::ChunkMode,
};
use sha1::{Digest, Sha1};

use self::{
    conversion::{bytes, from_lua},
    library::library,
    raised::{plain_text, raise, report},
    running::Running,
};
use super::{
    commands::{self, ScriptCommand},
    resp::{Outcome, Protocol, Reply, Text, integer},
    state::Server,
};

/// The Lua code that builds the environment of scripts, from functions implemented in Rust.
const PRELUDE: &str = include_str!("prelude.lua");
const NO_SCRIPT: &str = "NOSCRIPT No matching script. Please use EVAL.";
/// How many Lua instructions run between two checks for a shutdown of the server.
const HOOK_INTERVAL: u32 = 1_000_000;
/// How deep a reply may nest. Redis stops at the end of its Lua stack, which is deeper.
const MAX_DEPTH: usize = 200;

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
        let redis = library(&lua, server, &running)?;
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
