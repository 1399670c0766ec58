//! The text of a script, as it stands in `lua/`.

/// A Lua script of `lua/`, embedded in the binary.
#[derive(Debug)]
pub(crate) struct ScriptSource {
    /// `<kind>/<verb>`.
    pub(crate) name: &'static str,
    pub(crate) lua: &'static str,
    pub(crate) keys: Arity,
    pub(crate) args: Arity,
}

/// How many keys or arguments a script takes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arity {
    pub(crate) fixed: usize,
    /// How many more for each lock, in scripts over many locks.
    pub(crate) per_lock: usize,
}
