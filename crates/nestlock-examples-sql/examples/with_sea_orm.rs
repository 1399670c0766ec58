//! A holder that slept past its lease wakes up and writes: the database refuses it. With SeaORM.
//!
//! Run: `cargo run -p nestlock-examples-sql --example with_sea_orm`  (uses `NESTLOCK_URL`, or an embedded
//! server; the database is SQLite, in memory)
// the derive macros want public items
#![allow(clippy::print_stdout, unreachable_pub)]

use nestlock_examples_sql::{Failure, holders};
use sea_orm::{
    ConnectOptions, ConnectionTrait, Database, DatabaseConnection, DatabaseTransaction, DbErr, Set,
    TransactionTrait, entity::prelude::*, sea_query::OnConflict,
};

mod fence {
    use sea_orm::entity::prelude::*;

    #[derive(Clone, Debug, PartialEq, Eq, DeriveEntityModel)]
    #[sea_orm(table_name = "fence")]
    pub struct Model {
        #[sea_orm(primary_key, auto_increment = false)]
        pub name: String,
        pub token: i64,
    }

    #[derive(Copy, Clone, Debug, EnumIter, DeriveRelation)]
    pub enum Relation {}

    impl ActiveModelBehavior for ActiveModel {}
}

mod account {
    use sea_orm::entity::prelude::*;

    #[derive(Clone, Debug, PartialEq, Eq, DeriveEntityModel)]
    #[sea_orm(table_name = "account")]
    pub struct Model {
        #[sea_orm(primary_key)]
        pub id: i64,
        pub balance: i64,
    }

    #[derive(Copy, Clone, Debug, EnumIter, DeriveRelation)]
    pub enum Relation {}

    impl ActiveModelBehavior for ActiveModel {}
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    // a database in memory belongs to its connection
    let mut one = ConnectOptions::new("sqlite::memory:");
    one.max_connections(1);
    let database = Database::connect(one).await?;
    database
        .execute_unprepared(
            "CREATE TABLE fence (name TEXT PRIMARY KEY, token BIGINT NOT NULL);
             CREATE TABLE account (id BIGINT PRIMARY KEY, balance BIGINT NOT NULL);
             INSERT INTO account VALUES (7, 100);",
        )
        .await?;
    let holders = holders().await?;
    let (late, token) = (holders.sleeper.token(), holders.next.token());

    println!("the next holder pays 30, with token {token}");
    assert_eq!(pay(&database, 30, token).await?, Some(70));
    let paid = pay(&database, 50, late).await?;
    println!("the sleeper pays 50, with token {late}: {paid:?}");
    assert_eq!(paid, None);
    holders.next.release().await?;
    Ok(())
}

/// Pays, if no later holder has been here. Returns the balance that remains.
async fn pay(
    database: &DatabaseConnection,
    amount: i64,
    token: i64,
) -> Result<Option<i64>, Failure> {
    let transaction = database.begin().await?;
    // first, before anything is read
    if !claim(&transaction, "account:7", token).await? {
        return Ok(None);
    }
    let found = account::Entity::find_by_id(7).one(&transaction).await?;
    let balance = found.ok_or("there is no account 7")?.balance;
    let paid = account::ActiveModel {
        id: Set(7),
        balance: Set(balance - amount),
    };
    paid.update(&transaction).await?;
    transaction.commit().await?;
    Ok(Some(balance - amount))
}

/// Raises the fence of a lock to this token. Returns `false` if it is higher already.
async fn claim(transaction: &DatabaseTransaction, lock: &str, token: i64) -> Result<bool, DbErr> {
    let raised = OnConflict::column(fence::Column::Name)
        .update_column(fence::Column::Token)
        .action_and_where(
            Expr::col((fence::Entity, fence::Column::Token))
                .lte(Expr::col(("excluded", fence::Column::Token))),
        )
        .to_owned();
    let row = fence::ActiveModel {
        name: Set(lock.to_owned()),
        token: Set(token),
    };
    let claimed = fence::Entity::insert(row)
        .on_conflict(raised)
        .exec_without_returning(transaction)
        .await?;
    Ok(claimed == 1)
}
