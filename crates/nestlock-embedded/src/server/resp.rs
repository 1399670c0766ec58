//! The wire protocol: parses requests and writes replies, in RESP2 and RESP3.

mod number;
mod reply;
mod request;

pub(crate) use self::{
    number::{double, integer},
    reply::{Outcome, Protocol, Reply, Text},
    request::{MAX_REQUEST, Parser, Request},
};
