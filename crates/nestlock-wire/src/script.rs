//! Scripts as values: the texts that are sent, and the calls with their keys and arguments.

use std::sync::{Arc, OnceLock};

use smallvec::SmallVec;

use crate::{
    bundle::Bundle,
    digest::sha1,
    error::{StoreError, StoreErrorKind},
    refusal,
    source::{Arity, ScriptSource},
};

/// A script, and the texts that are sent for it.
///
/// For an example, see [`Call`].
#[derive(Debug)]
pub struct Script {
    /// Its text in Lua, and how many keys and arguments it takes.
    pub source: ScriptSource,
    /// The text that is sent and its digest, for plain and for sharded messages: see
    /// [`Script::text`].
    pub(crate) texts: [OnceLock<(String, String)>; 2],
    /// How an [`Arg::Derived`] is written: in parts, so that nothing is allocated. It must not
    /// panic.
    pub derive: fn(&str) -> [&str; 5],
    /// The scripts that it may be bundled with.
    pub(crate) bundle: Option<&'static Bundle>,
}

impl Script {
    /// Creates the script of a source. `derive` turns a name into what an [`Arg::Derived`] sends.
    pub const fn new(
        source: ScriptSource,
        derive: fn(&str) -> [&str; 5],
        bundle: Option<&'static Bundle>,
    ) -> Self {
        Self {
            source,
            texts: [const { OnceLock::new() }; 2],
            derive,
            bundle,
        }
    }

    /// Returns the text that is sent, and its digest. The text is the source inside
    /// `lua/numbered.lua`, so that each reply names its request. For sharded messages it is another
    /// text, which publishes with SPUBLISH.
    pub(crate) fn text(&'static self, sharded: bool) -> (&'static str, &'static str) {
        let (text, sha1) = self.texts[usize::from(sharded)].get_or_init(|| {
            let source = NUMBERED.replace("--SCRIPT", self.source.lua);
            let text = if sharded {
                source.replace(PUBLISH, "'spublish'")
            } else {
                source
            };
            let sha1 = sha1(&text);
            (text, sha1)
        });
        (text, sha1)
    }

    /// Returns what a server's error about this script means. A script that builds key names checks
    /// all of them before it writes: if one is on another node, nothing was executed. Nor does the
    /// script follow its record to that node, since its other keys may be here.
    pub fn refusal(&self, error: StoreError) -> StoreError {
        let is_elsewhere = match error.kind() {
            StoreErrorKind::Other => error.said().contains(NOT_HERE),
            StoreErrorKind::Moved => error.said().starts_with("ASK "),
            _ => false,
        };
        if is_elsewhere && self.source.names_keys {
            return StoreError::new(StoreErrorKind::TryAgain, false, error.said());
        }
        error
    }

    /// Returns the error with the commands that it may be about, if the server names none.
    pub(crate) fn explained(&'static self, error: StoreError, sharded: bool) -> StoreError {
        let said = error.said();
        let error = if self.source.is_atomic {
            error
        } else {
            refusal::of_a_script(error)
        };
        let is_about_one = match error.kind() {
            StoreErrorKind::UnknownCommand => true,
            // Redis 7.0 and later use these words
            StoreErrorKind::NoPermission => {
                said.contains("run this command") && said.contains("on @user_script:")
            }
            _ => false,
        };
        if !is_about_one || error.command().is_some() {
            return error;
        }
        let text = self.text(sharded).0;
        let line = said.split("@user_script:").nth(1).and_then(|rest| {
            let number: String = rest
                .trim_start()
                .chars()
                .take_while(char::is_ascii_digit)
                .collect();
            text.lines()
                .nth(number.parse::<usize>().ok()?.checked_sub(1)?)
        });
        // an error without a line was not raised, but caught
        let is_raised_and_caught = text.replace("redis.pcall(", "").contains("pcall(");
        let caught = if is_raised_and_caught {
            "call('"
        } else {
            "redis.pcall('"
        };
        let of_line = line.map_or_else(Vec::new, |line| commands(line, "call('"));
        let ways = [of_line, commands(text, caught), commands(text, "call('")];
        let some = ways
            .into_iter()
            .find(|commands| !commands.is_empty())
            .unwrap_or_default();
        error.about(Some(&some.join(",")))
    }

    /// Returns whether the script is over many locks.
    pub fn is_over_many(&self) -> bool {
        self.source.keys.per_lock > 0
    }
}

/// Returns the commands that a text calls in this way, each once.
fn commands<'t>(text: &'t str, call: &str) -> Vec<&'t str> {
    let mut found = Vec::new();
    for name in text
        .split(call)
        .skip(1)
        .filter_map(|rest| rest.split('\'').next())
    {
        if !found.contains(&name) {
            found.push(name);
        }
    }
    found
}

/// The error of a cluster node if a script uses a key that the node does not have. `Script` or
/// `script` comes before it.
const NOT_HERE: &str = "ttempted to access a non local key in a cluster";

/// The code around each script.
const NUMBERED: &str = include_str!("../lua/numbered.lua");

/// The publish command, as it appears in scripts.
const PUBLISH: &str = "'publish'";

/// One argument of a script.
///
/// For an example, see [`Call`].
#[derive(Debug, Clone)]
pub enum Arg {
    /// A text.
    Text(Arc<str>),
    /// The result of [`Script::derive`] for this name. It is built when it is sent: a client that
    /// holds many locks keeps no channel names.
    Derived(Arc<str>),
    /// A number, in decimal.
    Number(u64),
    /// Bytes.
    Bytes(Vec<u8>),
}

impl From<&Arc<str>> for Arg {
    fn from(text: &Arc<str>) -> Self {
        Self::Text(Arc::clone(text))
    }
}

impl From<u64> for Arg {
    fn from(number: u64) -> Self {
        Self::Number(number)
    }
}

impl From<u32> for Arg {
    fn from(number: u32) -> Self {
        Self::Number(number.into())
    }
}

/// A call of a script, with its keys and arguments. The first key decides the link. The keys and
/// arguments of a call for one lock fit inline, without an allocation.
///
/// ```
/// use nestlock_wire::{Arg, Arity, Call, Link, Script, ScriptSource, StoreError, clock::Instant};
///
/// static ADD: Script = Script::new(
///     ScriptSource {
///         name: "count/add",
///         lua: "redis.call('incrby', KEYS[1], ARGV[1])\nreturn 1\n",
///         keys: Arity { fixed: 1, per_lock: 0 },
///         args: Arity { fixed: 1, per_lock: 0 },
///         is_atomic: true,
///         names_keys: false,
///     },
///     |name| [name, "", "", "", ""],
///     None,
/// );
///
/// async fn add(link: &Link, count: u64) -> Result<bool, StoreError> {
///     let call = Call::new(&ADD, ["orders".into()], [Arg::Number(count)]);
///     let until = link.until(Instant::now());
///     let reply = link.eval(&call, until, false, None).await?;
///     Ok(reply.value.as_number() == Some(1))
/// }
/// # use nestlock_wire::{Address, ConnectionSettings, Dialer, Pace, Server, ServerSettings};
/// # use tokio::runtime::Handle;
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = nestlock_embedded::EmbeddedServer::start()?;
/// # let address = Address::Tcp(Server::new("127.0.0.1", server.addr().port()));
/// # let settings = ConnectionSettings::new(ServerSettings::new(address), Handle::current());
/// # let link = Link::connect(Dialer::new(settings), &std::sync::Arc::new(Pace::new())).await?;
/// # assert!(add(&link, 2).await?);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Call {
    /// The script.
    pub script: &'static Script,
    /// Its keys.
    pub keys: SmallVec<[Arc<str>; 2]>,
    /// Its arguments, without the number of the request.
    pub args: SmallVec<[Arg; 6]>,
}

impl Call {
    /// Creates a call of a script.
    ///
    /// # Panics
    ///
    /// With debug assertions, if the numbers of keys and arguments are not those of its source.
    pub fn new(
        script: &'static Script,
        keys: impl IntoIterator<Item = Arc<str>>,
        args: impl IntoIterator<Item = Arg>,
    ) -> Self {
        let (keys, args) = (SmallVec::from_iter(keys), SmallVec::from_iter(args));
        let locks = keys.len().saturating_sub(script.source.keys.fixed)
            / script.source.keys.per_lock.max(1);
        let fits = |arity: Arity, count| count == arity.fixed + locks * arity.per_lock;
        debug_assert!(
            fits(script.source.keys, keys.len()),
            "{}: {} keys",
            script.source.name,
            keys.len()
        );
        debug_assert!(
            fits(script.source.args, args.len()),
            "{}: {} args",
            script.source.name,
            args.len()
        );
        Self { script, keys, args }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    /// Some commands run by `redis.call`, and one by `redis.pcall`.
    static ACQUIRE: Script = Script::new(
        ScriptSource {
            name: "acquire",
            lua: "if redis.call('exists', KEYS[1]) == 0 then\n\
                  redis.call('hset', KEYS[1], ARGV[1], 1)\n\
                  end\n\
                  local set = redis.pcall('pexpire', KEYS[1], ARGV[2])\n\
                  if type(set) == 'table' then return set end\n\
                  return 1",
            keys: Arity {
                fixed: 1,
                per_lock: 0,
            },
            args: Arity {
                fixed: 3,
                per_lock: 0,
            },
            is_atomic: true,
            names_keys: false,
        },
        |name| [name, "", "", "", ""],
        None,
    );

    /// Errors of Redis 7.0, Redis 6.2 and Valkey 8.
    #[test]
    fn a_script_names_the_command_that_was_refused() {
        let line = ACQUIRE
            .text(false)
            .0
            .lines()
            .position(|line| line.contains("call('hset'"))
            .unwrap()
            + 1;
        let kind = StoreErrorKind::UnknownCommand;
        for (said, command) in [
            (
                format!(
                    "ERR Unknown Redis command called from script script: 6bb2, on @user_script:{line}."
                ),
                "hset",
            ),
            (
                format!("@user_script: {line}: Unknown Redis command called from Lua script"),
                "hset",
            ),
            (
                "ERR Unknown command called from script".to_owned(),
                "pexpire",
            ),
        ] {
            let error = ACQUIRE.explained(StoreError::new(kind, false, said.clone()), false);
            assert_eq!(error.command(), Some(command), "{said}");
        }
        // an error about a key names no command
        let said = "ERR ACL failure in script: No permissions to access a key script: 30ad, on @user_script:1.";
        let error = ACQUIRE.explained(
            StoreError::new(StoreErrorKind::NoPermission, false, said),
            false,
        );
        assert_eq!(error.command(), None);
    }
}
