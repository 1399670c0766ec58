//! nestlock alongside libraries of other languages that use the same records: see README.md, and `make interop`.
#![allow(missing_docs, unreachable_pub, dead_code)]
#![allow(
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    clippy::doc_markdown,
    clippy::items_after_statements,
    clippy::needless_pass_by_value,
    clippy::print_stdout,
    clippy::unwrap_used
)]

#[path = "../it/support/answers.rs"]
mod answers;
#[path = "../it/support/clock.rs"]
mod clock;
mod history;
mod pair;
mod redisson_cluster;
mod redisson_queue;
mod redisson_reader;
mod redisson_record;
mod rust_worker;
mod servers;
mod sides;
mod signal_record;
mod string_record;
#[path = "../it/support/wire.rs"]
mod wire;
mod worker;
