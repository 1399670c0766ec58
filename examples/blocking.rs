//! A program without async: threads move money between accounts, each pair of accounts locked.
//!
//! Run: `cargo run --example blocking`  (uses `NESTLOCK_URL`, or an embedded server)
#![allow(clippy::print_stdout)]

mod support;

use std::{
    error::Error,
    sync::atomic::{AtomicI64, Ordering::SeqCst},
    thread,
};

use nestlock::{LockClient, block_on};

const ACCOUNTS: usize = 4;
const THREADS: usize = 4;
const TRANSFERS: usize = 50;

/// A database whose reads and writes are separate, as with a synchronous driver such as diesel.
#[derive(Default)]
struct Database {
    balances: [AtomicI64; ACCOUNTS],
}

impl Database {
    fn read(&self, account: usize) -> i64 {
        self.balances[account].load(SeqCst)
    }

    fn write(&self, account: usize, balance: i64) {
        self.balances[account].store(balance, SeqCst);
    }
}

fn transfer(
    locks: &LockClient,
    database: &Database,
    from: usize,
    to: usize,
) -> nestlock::Result<()> {
    let both = [from, to].map(|account| locks.reentrant_lock(format!("account:{account}")));
    let [from_lock, to_lock] = both;
    let guard = locks.multi_lock([from_lock?, to_lock?])?.blocking_lock()?;
    let (less, more) = (database.read(from) - 1, database.read(to) + 1);
    // without the lock, another thread's transfer would be overwritten
    thread::yield_now();
    database.write(from, less);
    database.write(to, more);
    guard.blocking_unlock()
}

fn main() -> Result<(), Box<dyn Error>> {
    let server = support::server()?;
    // no runtime: the client has a thread of its own
    let locks = LockClient::connect_blocking(server.url())?;
    let database = Database::default();
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (locks, database) = (&locks, &database);
            scope.spawn(move || {
                for n in 0..TRANSFERS {
                    let from = (thread + n) % ACCOUNTS;
                    let to = (from + 1 + n % (ACCOUNTS - 1)) % ACCOUNTS;
                    transfer(locks, database, from, to).expect("a transfer");
                }
            });
        }
    });
    let sum: i64 = (0..ACCOUNTS).map(|account| database.read(account)).sum();
    println!(
        "{} transfers by {THREADS} threads; all balances together: {sum}",
        THREADS * TRANSFERS
    );
    assert_eq!(sum, 0);
    block_on(locks.shutdown())?;
    Ok(())
}
