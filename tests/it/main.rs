//! The integration tests: one binary, and a server for each test, real or embedded.
#![allow(missing_docs, unreachable_pub, dead_code)]
#![allow(
    clippy::cast_possible_wrap,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    clippy::doc_markdown,
    clippy::items_after_statements,
    clippy::match_same_arms,
    clippy::missing_panics_doc,
    clippy::needless_pass_by_value,
    clippy::print_stdout,
    clippy::similar_names,
    clippy::struct_excessive_bools,
    clippy::unchecked_time_subtraction,
    clippy::unwrap_used
)]

mod adopt;
mod attack;
mod bad_input;
mod bad_server;
mod blocking;
mod books;
mod bundle;
mod cancel;
mod cluster;
mod connect_errors;
mod contract;
mod crash;
mod credentials;
mod fair;
mod fair_permits;
mod fenced;
#[cfg(feature = "fred")]
mod fred_config;
mod grants;
mod house;
mod identity;
mod latch;
mod lazy;
mod left_to_lease;
mod lost_reply;
mod lua;
mod model;
mod multi;
mod mutex;
mod neighbours;
mod non_reentrant;
mod notes;
mod outage;
mod permits;
mod process;
mod pubsub;
mod read_write;
mod red;
#[cfg(all(feature = "redis-rs", feature = "rustls"))]
mod redis_rs;
mod reentrant;
mod refusals;
mod relay;
mod replicas;
mod replicas_attack;
mod resend;
mod residue;
mod rivals;
mod runtimes;
mod semaphore;
mod sentinel;
mod shifted;
mod signal;
mod slow_link;
mod spin;
mod string;
mod support;
#[cfg(feature = "rustls")]
mod tls;
mod unpolled;
mod untold;
#[cfg(feature = "fred")]
mod urls;
mod waiters;
mod watchdog;
mod wire_format;
