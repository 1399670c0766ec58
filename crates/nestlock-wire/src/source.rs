//! The text of a script, as it stands in `lua/`.

/// A Lua script of `lua/`, embedded in the binary.
#[derive(Debug)]
pub struct ScriptSource {
    /// `<kind>/<verb>`.
    pub name: &'static str,
    /// The text. It is sent inside `lua/numbered.lua`, which takes one more argument, the number of
    /// the request.
    pub lua: &'static str,
    /// How many keys it takes.
    pub keys: Arity,
    /// How many arguments it takes.
    pub args: Arity,
    /// Whether it builds names of keys itself, which a cluster does not see among its keys.
    pub names_keys: bool,
}

/// How many keys or arguments a script takes.
#[derive(Debug, Clone, Copy)]
pub struct Arity {
    /// How many there are always.
    pub fixed: usize,
    /// How many more for each lock, in scripts over many locks.
    pub per_lock: usize,
}
