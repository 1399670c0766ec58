#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))] // docs.rs shows the feature that an item needs

mod acks;
mod address;
mod bundle;
#[cfg(feature = "fred")]
mod by_fred;
pub mod clock;
mod connection;
mod credential_source;
mod credentials;
mod dialer;
mod digest;
mod epoch;
mod error;
mod expiring;
mod failure;
mod health;
mod limits;
mod link;
#[doc(hidden)]
pub mod log;
mod numbered;
mod own;
mod pace;
mod process;
mod push;
mod reach;
mod refusal;
mod request;
mod resp;
mod round_trip;
mod script;
mod settings;
mod source;
mod stream;
#[cfg(test)]
mod tests;
mod texts;
mod until;
mod wake;

#[cfg(feature = "fred")]
pub use crate::by_fred::connector::fred_client;
#[doc(hidden)]
pub use crate::error::advice::all_advice;
#[cfg(feature = "rustls")]
pub use crate::settings::TlsSettings;
pub use crate::{
    acks::{Acks, Copies, Receipt, ScriptReply, send_wait},
    address::{Address, Server},
    bundle::Bundle,
    connection::{CloseOnDrop, Connection},
    credential_source::CredentialSource,
    credentials::{CredentialProvider, Credentials, Login},
    dialer::{Dialer, Locate, Wire},
    epoch::{Epoch, Epochs},
    error::{StoreError, StoreErrorKind},
    failure::{Failure, NotConnected},
    link::{Link, LinkPurpose, commands::ServerInfo},
    pace::{Pace, jitter},
    process::Home,
    push::{Push, Sink},
    request::Request,
    resp::Value,
    script::{Arg, Call, Script},
    settings::{AnnouncedNames, ConnectionSettings, ServerSettings},
    source::{Arity, ScriptSource},
    stream::has_io_here,
    until::Until,
};
