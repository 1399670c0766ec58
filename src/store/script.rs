//! How the scripts of `lua/` are declared, and how their arguments are built.

use nestlock_wire::Arg;

use crate::owner::OwnerId;

impl From<&OwnerId> for Arg {
    fn from(owner: &OwnerId) -> Self {
        Self::Text(owner.to_arc())
    }
}

/// Declares a `static` script: `script!(RELEASE = "reentrant/release", parts = ["held"], keys = 1,
/// args = 3)`. A name without a file does not compile. The text of each part comes before the
/// script's own, in this order. A script over many locks has `keys = 0 + 1 per_lock`, and its
/// arguments in the same form. With `bundle = PAIR` it may be sent together with the scripts of
/// that bundle. `names_keys = true` means that it builds key names itself.
macro_rules! script {
    (@bundle) => { None };
    (@bundle $bundle:ident) => { Some(&$bundle) };
    (@names_keys) => { false };
    (@names_keys $names_keys:literal) => { $names_keys };
    (@arity $fixed:literal) => { nestlock_wire::Arity { fixed: $fixed, per_lock: 0 } };
    (@arity $fixed:literal $each:literal) => { nestlock_wire::Arity { fixed: $fixed, per_lock: $each } };
    (
        $id:ident = $name:literal,
        $(parts = [$($part:literal),+],)?
        keys = $keys:literal $(+ $keys_each:literal per_lock)?,
        args = $args:literal $(+ $args_each:literal per_lock)?
        $(, bundle = $bundle:ident)?
        $(, names_keys = $names_keys:literal)?
    ) => {
        static $id: nestlock_wire::Script = nestlock_wire::Script::new(
            nestlock_wire::ScriptSource {
                name: $name,
                lua: concat!(
                    $($(include_str!(concat!("../../lua/parts/", $part, ".lua")),)+)?
                    include_str!(concat!("../../lua/", $name, ".lua")),
                ),
                keys: $crate::store::script!(@arity $keys $($keys_each)?),
                args: $crate::store::script!(@arity $args $($args_each)?),
                is_atomic: true,
                names_keys: $crate::store::script!(@names_keys $($names_keys)?),
            },
            $crate::keys::channel_parts,
            $crate::store::script!(@bundle $($bundle)?),
        );
    };
}
pub(crate) use script;
