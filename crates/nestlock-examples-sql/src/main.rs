//! A holder that slept past its lease wakes up and writes: the database rejects it, by
//! `WHERE fence <= ?`.
//!
//! Run: `cargo run -p nestlock-examples-sql`  (uses `NESTLOCK_URL`, or an embedded server)
#![allow(clippy::print_stdout)]

use std::{env, error::Error, time::Duration};

use nestlock::{AcquireOptions, FencingToken, LockClient};
use nestlock_embedded::EmbeddedServer;
use rusqlite::{Connection, params};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let ours = if env::var("NESTLOCK_URL").is_err() {
        Some(EmbeddedServer::start()?)
    } else {
        None
    };
    let url = ours.as_ref().map_or_else(
        || env::var("NESTLOCK_URL").unwrap_or_default(),
        EmbeddedServer::url,
    );

    let database = Connection::open_in_memory()?;
    database.execute_batch(
        "CREATE TABLE account (id INTEGER PRIMARY KEY, balance INTEGER NOT NULL, fence INTEGER NOT NULL);
         INSERT INTO account VALUES (7, 100, 0);",
    )?;

    // two clients stand for two processes
    let (sleepy, lively) = (
        LockClient::connect(&url).await?,
        LockClient::connect(&url).await?,
    );
    let short = AcquireOptions::new().lease(Duration::from_millis(200));

    let late = sleepy.fenced_lock("account:7")?.lock_with(short).await?;
    let late_token = late.fencing_token().ok_or("a fenced lock has tokens")?;
    let seen_by_late = balance(&database, late_token)?;
    println!("the sleeper holds the lock, sees {seen_by_late}, and falls asleep");

    // the lease ends without a release, and the next holder acquires the lock
    let guard = lively.fenced_lock("account:7")?.lock().await?;
    let token = guard.fencing_token().ok_or("a fenced lock has tokens")?;
    assert!(token > late_token);
    let seen = balance(&database, token)?;
    assert!(pay(&database, seen - 30, token)?);
    println!("the next holder pays 30");
    guard.unlock().await?;

    // the sleeper wakes up, and nothing notifies it before it acts: the database stops it
    let accepted = pay(&database, seen_by_late - 50, late_token)?;
    println!(
        "the sleeper pays 50: {}",
        if accepted { "accepted" } else { "refused" }
    );
    assert!(!accepted);
    let left = database.query_row("SELECT balance FROM account WHERE id = 7", [], |row| {
        row.get::<_, i64>(0)
    })?;
    println!("balance: {left}");
    assert_eq!(left, 70);

    // without the condition the same statement succeeds, and a payment of 30 is undone
    let unguarded = database.execute(
        "UPDATE account SET balance = ?1 WHERE id = 7",
        [seen_by_late - 50],
    )?;
    println!("without the token: {unguarded} row changed");
    assert!(unguarded == 1 && late.is_lost());
    drop(late);
    sleepy.shutdown().await?;
    lively.shutdown().await?;
    Ok(())
}

/// Reads the balance, and makes lower tokens invalid first.
fn balance(database: &Connection, token: FencingToken) -> Result<i64, Box<dyn Error>> {
    let claimed = database.execute(
        "UPDATE account SET fence = ?1 WHERE id = 7 AND fence <= ?1",
        [i64::from(token)],
    )?;
    if claimed == 0 {
        return Err("a later holder has acquired the lock".into());
    }
    Ok(
        database.query_row("SELECT balance FROM account WHERE id = 7", [], |row| {
            row.get(0)
        })?,
    )
}

/// Writes the balance. Returns `false` if a higher token was used before.
fn pay(database: &Connection, balance: i64, token: FencingToken) -> Result<bool, Box<dyn Error>> {
    let changed = database.execute(
        "UPDATE account SET balance = ?1, fence = ?2 WHERE id = 7 AND fence <= ?2",
        params![balance, i64::from(token)],
    )?;
    Ok(changed == 1)
}
