//! Bundles scripts into one: two thirds of a script's cost on a server is per-call overhead.
//!
//! The text of a bundle is built from the texts of its scripts. Each script has its own reply or
//! error, and its own writes, as if the scripts had been sent one after the other.
//!
//! No two of them are about one lock. A middlebox may execute a request twice, which each script
//! bears, but not an acquire that finds its lock busy together with the release behind it: the
//! second time, the acquire would get in, and no caller would learn of it. Decision 16.

use std::{fmt::Write, sync::OnceLock};

use crate::{digest::sha1, source::ScriptSource};

/// How many keys and arguments each call in a bundle has: the bundle's text expects exactly these.
pub(crate) const ONE: (usize, usize) = (1, 3);
/// Most scripts in a bundle: a single digit names each.
const MOST: usize = 9;

/// Scripts that may be sent together in any combination: up to 9, with 1 key and 3 arguments each.
/// A call with other numbers of keys or arguments is sent alone, and so is a script beyond the 9th.
///
/// The texts become functions in one text, so they must be written for that. They have no long
/// comments. They do not change `KEYS`, `ARGV` or the protocol. An error is a text, or the reply of
/// a command. A local function begins with `local function` and ends with `end`, each at the
/// beginning of a line; it uses nothing from outside itself, neither `KEYS` nor `ARGV`; and it has
/// the same text in each script that has a function of that name.
///
/// ```
/// use nestlock_wire::{Arity, Bundle, Script, ScriptSource};
///
/// static SET: Script = Script::new(
///     ScriptSource {
///         name: "text/set",
///         lua: "redis.call('set', KEYS[1], ARGV[1] .. ARGV[2] .. ARGV[3])\nreturn 1\n",
///         keys: Arity { fixed: 1, per_lock: 0 },
///         args: Arity { fixed: 3, per_lock: 0 },
///         is_atomic: true,
///         names_keys: false,
///     },
///     |name| [name, "", "", "", ""],
///     Some(&TEXTS),
/// );
/// static TEXTS: Bundle = Bundle::of(&[&SET.source]);
/// # let _ = &SET;
/// ```
#[derive(Debug)]
pub struct Bundle {
    scripts: &'static [&'static ScriptSource],
    text: OnceLock<(String, String)>,
}

impl Bundle {
    /// Returns the bundle of these scripts.
    #[must_use]
    pub const fn of(scripts: &'static [&'static ScriptSource]) -> Self {
        Self {
            scripts,
            text: OnceLock::new(),
        }
    }

    /// Returns the digit of a script in this bundle. Returns `None` if the script is not in it.
    pub(crate) fn digit(&self, script: &ScriptSource) -> Option<u8> {
        let at = self
            .scripts
            .iter()
            .take(MOST)
            .position(|of_it| std::ptr::eq(*of_it, script))?;
        Some(b'1' + at as u8)
    }

    /// Returns the text and its digest. The reply is a list: the number of the request, which is
    /// the last argument, then the reply of each script.
    pub(crate) fn text(&'static self) -> (&'static str, &'static str) {
        let (source, sha1) = self.text.get_or_init(|| {
            let source = self.source();
            let sha1 = sha1(&source);
            (source, sha1)
        });
        (source, sha1)
    }

    /// Returns the source. Each script becomes a function, and the local functions that they share
    /// are defined once.
    fn source(&self) -> String {
        let (mut shared, mut bodies) = (String::new(), String::new());
        for script in self.scripts {
            let _ = writeln!(bodies, "function(KEYS, ARGV)");
            let (mut function, mut is_inside) = (String::new(), false);
            for line in script.lua.lines().filter(|line| !line.starts_with("--")) {
                is_inside |= line.starts_with("local function ");
                let text = if is_inside {
                    &mut function
                } else {
                    &mut bodies
                };
                let _ = writeln!(text, "{line}");
                if is_inside && line == "end" {
                    is_inside = false;
                    let function = std::mem::take(&mut function);
                    if !shared.contains(&function) {
                        shared.push_str(&function);
                    }
                }
            }
            bodies.push_str("end,\n");
        }
        format!(
            "{shared}local scripts = {{\n{bodies}}}\n\
             local answers, keys, args, at = {{tonumber(ARGV[#ARGV])}}, {{}}, {{}}, 0\n\
             for n, key in ipairs(KEYS) do\n\
             keys[1], args[1], args[2], args[3] = key, ARGV[at + 2], ARGV[at + 3], ARGV[at + 4]\n\
             local ended, answer = pcall(scripts[tonumber(ARGV[at + 1])], keys, args)\n\
             if not ended and type(answer) ~= 'table' then answer = {{err = answer}} end\n\
             answers[n + 1], at = answer or false, at + 4\n\
             end\n\
             return answers\n"
        )
    }
}
