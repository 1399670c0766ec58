//! One connection to a server, from its handshake to its end, and links that replace it. Two
//! independent clients implement a connection.
//!
//! The layers above see requests, replies, messages, and whether a request may have been executed.
//! They decide where to connect.

pub(crate) mod acks;
pub(crate) mod address;
pub(crate) mod bundle;
#[cfg(feature = "fred")]
pub(crate) mod by_fred;
pub(crate) mod connection;
pub(crate) mod dialer;
pub(crate) mod digest;
pub(crate) mod epoch;
pub(crate) mod error;
pub(crate) mod failure;
pub(crate) mod health;
pub(crate) mod limits;
pub(crate) mod link;
pub(crate) mod numbered;
pub(crate) mod own;
pub(crate) mod pace;
pub(crate) mod push;
pub(crate) mod reach;
pub(crate) mod refusal;
pub(crate) mod request;
pub(crate) mod resp;
pub(crate) mod round_trip;
pub(crate) mod script;
pub(crate) mod settings;
pub(crate) mod source;
pub(crate) mod stream;
pub(crate) mod texts;
pub(crate) mod until;
pub(crate) mod wake;
