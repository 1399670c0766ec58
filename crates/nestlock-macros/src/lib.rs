//! The attribute `#[locked]`. Use it from `nestlock-recipes`, whose module `locked` says what it does: what it expands to
//! calls functions of that crate.

mod args;
mod expand;
mod time;

use proc_macro::TokenStream;

/// Runs an async function under a distributed lock. The module `locked` of `nestlock-recipes` is its documentation.
#[proc_macro_attribute]
pub fn locked(args: TokenStream, item: TokenStream) -> TokenStream {
    expand::expand(args.into(), &item.into()).into()
}
