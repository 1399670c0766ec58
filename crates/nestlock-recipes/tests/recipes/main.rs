//! Tests the recipes on embedded servers, whose clock the test moves, and on real servers with
//! processes that are killed.
#![allow(missing_docs, unreachable_pub)]
#![allow(clippy::missing_panics_doc, clippy::print_stdout, clippy::unwrap_used)]

mod attack;
mod cached;
mod layer;
mod leader;
mod locked;
mod once_per;
mod stage;
mod store;
mod support;
