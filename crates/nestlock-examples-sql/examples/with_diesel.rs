//! A holder that slept past its lease wakes up and writes: the database refuses it. With diesel.
//!
//! Run: `cargo run -p nestlock-examples-sql --example with_diesel`  (uses `NESTLOCK_URL`, or an embedded
//! server; the database is SQLite, in memory)
// `table!` makes public items without docs
#![allow(clippy::print_stdout, missing_docs)]

use diesel::{
    Connection, SqliteConnection, connection::SimpleConnection, dsl::insert_into, prelude::*,
    query_dsl::methods::FilterDsl, upsert::excluded,
};
use nestlock_examples_sql::{Failure, holders};

diesel::table! {
    fence (name) {
        name -> Text,
        token -> BigInt,
    }
}

diesel::table! {
    account (id) {
        id -> BigInt,
        balance -> BigInt,
    }
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let mut database = SqliteConnection::establish(":memory:")?;
    database.batch_execute(
        "CREATE TABLE fence (name TEXT PRIMARY KEY, token BIGINT NOT NULL);
         CREATE TABLE account (id BIGINT PRIMARY KEY, balance BIGINT NOT NULL);
         INSERT INTO account VALUES (7, 100);",
    )?;
    let holders = holders().await?;
    let (late, token) = (holders.sleeper.token(), holders.next.token());

    println!("the next holder pays 30, with token {token}");
    assert_eq!(pay(&mut database, 30, token)?, Some(70));
    let paid = pay(&mut database, 50, late)?;
    println!("the sleeper pays 50, with token {late}: {paid:?}");
    assert_eq!(paid, None);
    holders.next.release().await?;
    Ok(())
}

/// Pays, if no later holder has been here. Returns the balance that remains.
fn pay(database: &mut SqliteConnection, amount: i64, token: i64) -> QueryResult<Option<i64>> {
    database.transaction(|database| {
        // first, before anything is read
        if !claim(database, "account:7", token)? {
            return Ok(None);
        }
        let account = account::table.find(7);
        let balance: i64 = account.select(account::balance).first(database)?;
        diesel::update(account)
            .set(account::balance.eq(balance - amount))
            .execute(database)?;
        Ok(Some(balance - amount))
    })
}

/// Raises the fence of a lock to this token. Returns `false` if it is higher already.
fn claim(database: &mut SqliteConnection, lock: &str, token: i64) -> QueryResult<bool> {
    let claimed = insert_into(fence::table)
        .values((fence::name.eq(lock), fence::token.eq(token)))
        .on_conflict(fence::name)
        .do_update()
        .set(fence::token.eq(excluded(fence::token)))
        .filter(fence::token.le(excluded(fence::token)))
        .execute(database)?;
    Ok(claimed == 1)
}
