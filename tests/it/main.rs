//! The integration tests: one binary, a real server for each test.
#![allow(missing_docs, clippy::cast_sign_loss, clippy::missing_panics_doc, unreachable_pub, dead_code)]

mod bad_input;
mod bad_server;
mod cancel;
mod contract;
mod crash;
mod house;
mod identity;
mod lost_reply;
mod lua;
mod outage;
mod pubsub;
mod reentrant;
mod resend;
mod residue;
mod support;
mod waiters;
mod watchdog;
mod wire_format;
