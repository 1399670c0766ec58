//! A holder that slept past its lease wakes up and writes: the database refuses it. With sqlx; the
//! SQL is the same for Postgres.
//!
//! Run: `cargo run -p nestlock-examples-sql --example with_sqlx`  (uses `NESTLOCK_URL`, or an embedded
//! server; the database is SQLite, in memory)
#![allow(clippy::print_stdout)]

use nestlock_examples_sql::{Failure, holders};
use sqlx::{Sqlite, SqlitePool, Transaction, sqlite::SqlitePoolOptions};

#[tokio::main]
async fn main() -> Result<(), Failure> {
    // a database in memory belongs to its connection
    let one = SqlitePoolOptions::new().max_connections(1);
    let database = one.connect("sqlite::memory:").await?;
    sqlx::raw_sql(
        "CREATE TABLE fence (name TEXT PRIMARY KEY, token BIGINT NOT NULL);
         CREATE TABLE account (id BIGINT PRIMARY KEY, balance BIGINT NOT NULL);
         INSERT INTO account VALUES (7, 100);",
    )
    .execute(&database)
    .await?;
    let holders = holders().await?;
    let (late, token) = (holders.sleeper.token(), holders.next.token());

    println!("the next holder pays 30, with token {token}");
    assert_eq!(pay(&database, 30, token).await?, Some(70));

    // the first holder wakes up, and nothing tells it before it acts
    let paid = pay(&database, 50, late).await?;
    println!("the sleeper pays 50, with token {late}: {paid:?}");
    assert_eq!(paid, None);

    // a holder may write more than once
    assert_eq!(pay(&database, 5, token).await?, Some(65));
    holders.next.release().await?;
    Ok(())
}

/// Pays, if no later holder has been here. Returns the balance that remains.
async fn pay(database: &SqlitePool, amount: i64, token: i64) -> Result<Option<i64>, Failure> {
    let mut transaction = database.begin().await?;
    // first, before anything is read: until the commit, Postgres lets no other holder past this row
    if !claim(&mut transaction, "account:7", token).await? {
        return Ok(None);
    }
    let balance: i64 = sqlx::query_scalar("SELECT balance FROM account WHERE id = 7")
        .fetch_one(&mut *transaction)
        .await?;
    sqlx::query("UPDATE account SET balance = $1 WHERE id = 7")
        .bind(balance - amount)
        .execute(&mut *transaction)
        .await?;
    transaction.commit().await?;
    Ok(Some(balance - amount))
}

/// Raises the fence of a lock to this token. Returns `false` if it is higher already.
async fn claim(
    transaction: &mut Transaction<'_, Sqlite>,
    lock: &str,
    token: i64,
) -> Result<bool, sqlx::Error> {
    let claimed = sqlx::query(
        "INSERT INTO fence (name, token) VALUES ($1, $2)
         ON CONFLICT (name) DO UPDATE SET token = excluded.token WHERE fence.token <= excluded.token",
    )
    .bind(lock)
    .bind(token)
    .execute(&mut **transaction)
    .await?;
    Ok(claimed.rows_affected() == 1)
}
