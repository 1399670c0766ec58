//! The wire protocol: parses requests and writes replies, in RESP2 and RESP3.
//!
//! The parser is not `redis-protocol`'s: a server reads requests only, must limit the lengths that
//! are announced, takes inline requests, and replies to violations as Redis does.

mod number;
mod reply;
mod request;

pub(crate) use self::{
    number::{double, integer},
    reply::{Outcome, Protocol, Reply, Text},
    request::{MAX_REQUEST, Parser, Request},
};
