//! The attribute `#[locked]`. Use it from `nestlock-recipes`, whose module `locked` documents it:
//! its expansion calls functions of that crate.

mod args;
mod expand;
mod time;

use proc_macro::TokenStream;

/// Runs an async function under a distributed lock. See the module `locked` of `nestlock-recipes`.
#[proc_macro_attribute]
pub fn locked(args: TokenStream, item: TokenStream) -> TokenStream {
    expand::expand(args.into(), &item.into()).into()
}
