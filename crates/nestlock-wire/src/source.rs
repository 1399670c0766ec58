//! The text of a script, as it stands in `lua/`.

/// A Lua script of `lua/`, embedded in the binary.
///
/// For an example, see [`Call`].
///
/// [`Call`]: crate::Call
#[derive(Debug)]
pub struct ScriptSource {
    /// `<kind>/<verb>`.
    pub name: &'static str,
    /// The text. It is sent inside `lua/numbered.lua`, which takes one more argument, the number of
    /// the request.
    ///
    /// It may return `nil`, an integer from -8 to 6, a list, or an error that a command replied
    /// with. Any other reply cannot be combined with the number: it ends the connection, or arrives
    /// as another value. An error of its own must not begin with a code of the server, such as
    /// `LOADING`.
    pub lua: &'static str,
    /// How many keys it takes.
    pub keys: Arity,
    /// How many arguments it takes.
    pub args: Arity,
    /// Whether the script writes nothing if any of its commands is refused, because it checks
    /// first. The error of a command inside the script then means that nothing was changed; without
    /// this, it means that the script may have been executed.
    pub is_atomic: bool,
    /// Whether it builds key names itself, which a cluster does not see among its keys.
    pub names_keys: bool,
}

/// How many keys or arguments a script takes.
///
/// For an example, see [`Call`].
///
/// [`Call`]: crate::Call
#[derive(Debug, Clone, Copy)]
pub struct Arity {
    /// The number that every call has.
    pub fixed: usize,
    /// The number added for each lock, in scripts over many locks.
    pub per_lock: usize,
}
