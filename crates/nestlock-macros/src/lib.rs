//! The attribute `#[locked]`. Use it from `nestlock-recipes`, whose module `locked` documents it:
//! its expansion calls functions of that crate.

mod args;
mod expand;
mod time;

use proc_macro::TokenStream;

/// Runs an async function under a distributed lock. See the module `locked` of `nestlock-recipes`.
///
/// For an example, see [`nestlock_recipes::locked`].
///
/// [`nestlock_recipes::locked`]: https://docs.rs/nestlock-recipes/latest/nestlock_recipes/locked/
#[proc_macro_attribute]
pub fn locked(args: TokenStream, item: TokenStream) -> TokenStream {
    expand::expand(args.into(), &item.into()).into()
}
