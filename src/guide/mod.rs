//! The guide: what nestlock promises, and how to use it. The README is the short form.
//!
//! | page | what it covers |
//! |---|---|
//! | [`promises`] | what holds under which faults, and what is not promised |
//! | [`choosing`] | which lock to choose, what it costs, which kinds exclude each other |
//! | [`owners`] | who holds a lock: tasks, threads, scopes, names |
//! | [`fencing`] | what stops a holder that was paused past its lease |
//! | [`cancellation`] | what a dropped future leaves behind, and how a loss is reported |
//! | [`errors`] | every error: what it means, what to do, which HTTP status |
//! | [`configuration`] | the options of a client, and how to address a server |
//! | [`permissions`] | what an ACL user needs |
//! | [`services`] | what nestlock asks of a server, and what managed services, other servers and proxies offer |
//! | [`observing`] | how to observe locks: connection names, metrics, spans |
//! | [`performance`] | what a lock costs |
//! | [`refresh_token`] | how to: replicas share an OAuth login whose refresh token works once |
//! | [`idempotency`] | how to: a service handles a request with an `Idempotency-Key` once |
//! | [`fencing_in_sql`] | how to: a database refuses the write of a holder that was paused; sqlx, diesel, SeaORM |
//! | [`restart`] | how to: a worker keeps its lock over a deployment, and gets it back after a crash |
//! | [`jobs`] | how to: locks with apalis, tokio-cron-scheduler and other job libraries |
//! | [`from_redisson`], [`from_redlock`], [`from_python_redis_lock`] | the counterparts of your methods, and what differs |
//!
//! # Examples
//!
//! Each program in the repository's `examples/` answers one question. There is nothing to install: the server is in the process.
//! `NESTLOCK_URL=redis://host:6379` makes them use your own server. `make demo` runs them all.
//!
//! | `cargo run --example ..` | the question |
//! |---|---|
//! | `quickstart` | can a function that holds a lock call another one that takes it? |
//! | `transfer` | what happens to money without a lock, and with one? Four processes |
//! | `try_and_timeout` | how do I wait for a while, not wait at all, or give up? |
//! | `lost_lease` | how do I learn that the lock is lost, and stop? |
//! | `cluster` | what happens to my locks when a slot moves, or a master of a cluster dies? Needs a server program |
//! | `failover` | what happens to my locks when the master dies? Needs a server program |
//! | `fair` | who gets the lock next? |
//! | `read_write` | how can many read at once, and one write alone? |
//! | `multi_lock` | how do I lock several things without a deadlock? |
//! | `red_lock` | how do I lock over several servers, one of which may fail? |
//! | `rotating_token` | how does a client log in with tokens that expire? Needs a server program |
//! | `blocking` | how does a program without async take locks? |
//! | `shutdown` | how do I release all locks at SIGTERM or ctrl-c? |
//! | `worker_pool` | how do many workers share a list of jobs, one worker for each? |
//! | `limit_concurrency` | how do at most three tasks of all processes call a service at once? |
//! | `start_together` | how do the workers of all processes start at the same moment, and how is their end awaited? |
//! | `job_on_replicas` | how does a job run once per interval, on any one replica? |
//! | `survive_restart` | how does a worker keep its lock when it is deployed, or get it back when it was killed? |
//! | `refresh_token` | how do replicas refresh a token that may be used only once? |
//! | `cache_fill` | how is a cache filled only once, however many requests miss it? |
//! | `metrics` | what does a lock cost my program, and is any lost? With `--features metrics` |
//! | `signal_lock` | how do Python (`python-redis-lock`) and Rust share a lock, and what frees it if its holder dies? |
//! | `hand_over` | how does a worker carry on under the lock that a request took? Two processes |
//! | `explicit_owner` | what if the task is not the owner? Named owners, hand-over, `join!` |
//! | `fencing` | what stops the late write of a paused holder? |
//! | `cargo run -p nestlock-recipes --all-features --example ..` with `cached`, `once_per` or `leader` | ready-made patterns |
//! | `cargo run -p nestlock-examples-axum` | what does a handler reply while another request holds the lock, or the server is unreachable? |
//! | `cargo run -p nestlock-examples-axum --example layer` | how does a router handle one request at a time, with unchanged handlers? |
//! | `cargo run -p nestlock-examples-axum --example idempotency` | how does a retried `POST` get the first response, and do nothing again? |
//! | `cargo run -p nestlock-recipes --example locked` | how does a function run under a lock, with an unchanged body? |
//! | `cargo run -p nestlock-examples-sql --example ..` with `with_sqlx`, `with_diesel` or `with_sea_orm` | what stops that late write in SQL? |
//! | `cargo run -p nestlock-examples-jobs --example ..` with `with_apalis` or `with_cron_scheduler` | how do job libraries and locks fit together? |
//!
//! # Testing your own code
//!
//! The crate `nestlock-embedded` has a server for tests: in the process, with nothing installed, one per test. You can advance its
//! clock ("what if I lose the lock?") and make it hang. See its README. It is not for production, and nestlock never starts it by
//! itself.

#[doc = include_str!("promises.md")]
pub mod promises {}

#[doc = include_str!("choosing.md")]
pub mod choosing {}

#[doc = include_str!("owners.md")]
pub mod owners {}

#[doc = include_str!("fencing.md")]
pub mod fencing {}

#[doc = include_str!("cancellation.md")]
pub mod cancellation {}

#[doc = include_str!("errors.md")]
pub mod errors {}

#[doc = include_str!("configuration.md")]
pub mod configuration {}

#[doc = include_str!("permissions.md")]
pub mod permissions {}

#[doc = include_str!("services.md")]
pub mod services {}

#[doc = include_str!("observing.md")]
pub mod observing {}

#[doc = include_str!("performance.md")]
pub mod performance {}

#[doc = include_str!("refresh_token.md")]
pub mod refresh_token {}

#[doc = include_str!("idempotency.md")]
pub mod idempotency {}

#[doc = include_str!("fencing_in_sql.md")]
pub mod fencing_in_sql {}

#[doc = include_str!("restart.md")]
pub mod restart {}

#[doc = include_str!("jobs.md")]
pub mod jobs {}

#[doc = include_str!("from_redisson.md")]
pub mod from_redisson {}

#[doc = include_str!("from_redlock.md")]
pub mod from_redlock {}

#[doc = include_str!("from_python_redis_lock.md")]
pub mod from_python_redis_lock {}
