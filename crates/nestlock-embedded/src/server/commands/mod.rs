//! The commands: one table, and one function for each. Commands that are not in the table, and
//! unknown options, are refused with an error.

// all commands have the same signature, even those that cannot fail
#![allow(clippy::unnecessary_wraps)]

mod call;
mod command;
mod connection;
mod error_text;
mod float;
mod glob;
mod hashes;
mod keys;
mod lists;
mod pubsub;
mod server;
mod sorted_sets;
mod strings;
mod table;

pub(crate) use self::{
    call::run,
    command::{Command, Run, ScriptCommand},
    error_text::{NOT_AN_INTEGER, SYNTAX},
    lists::serve_blocked,
    table::{Unfit, find},
};
