//! Counts orders, and reports after each failure whether the order was counted.
//!
//! The example starts its own server and pauses it for a while: the request in flight at that time
//! is in doubt.
#![allow(clippy::print_stdout)]

use std::{error::Error, sync::Arc, time::Duration};

use nestlock_embedded::EmbeddedServer;
use nestlock_wire::{
    Address, ConnectionSettings, Dialer, Link, Pace, Server, ServerSettings, StoreError,
};
use tokio::runtime::Handle;

async fn count(link: &Link) -> Result<Option<i64>, StoreError> {
    let limit = Duration::from_millis(500);
    let reply = link.command(&["INCR", "orders"], limit).await?;
    Ok(reply.as_number())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let server = EmbeddedServer::start()?;
    let address = Address::Tcp(Server::new("127.0.0.1", server.addr().port()));
    let settings = ConnectionSettings::new(ServerSettings::new(address), Handle::current());
    let link = Link::connect(Dialer::new(settings), &Arc::new(Pace::new())).await?;
    println!("counted: {:?}", count(&link).await?);
    server.pause();
    match count(&link).await {
        Ok(orders) => println!("counted: {orders:?}"),
        Err(error) if error.may_have_executed() => println!("it may have been counted: {error}"),
        Err(error) => println!("it was not counted: {error}"),
    }
    // a client that resends requests would have counted twice by now
    server.resume();
    let orders = link
        .command(&["GET", "orders"], Duration::from_secs(5))
        .await?;
    println!("there are {:?}", orders.as_number());
    link.close().await;
    Ok(())
}
