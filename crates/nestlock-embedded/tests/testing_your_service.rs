//! How to test a service that guards something with nestlock: a box office that must not sell a seat twice.
//!
//! Each test has a server of its own, with nothing installed: real locks, real connections, no shared state.
#![allow(missing_docs, clippy::unwrap_used)]

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use nestlock::{Error, LockClient};
use nestlock_embedded::EmbeddedServer;
use tokio::sync::{Notify, watch};

/// The ticket store: it reads and writes, but does nothing to keep two buyers apart.
type Sold = Arc<Mutex<HashMap<u32, String>>>;

/// The service under test.
#[derive(Clone)]
struct BoxOffice {
    locks: LockClient,
    sold: Sold,
    payments: Payments,
}

#[derive(Debug, PartialEq)]
enum Refusal {
    SoldAlready,
    Busy,
    LockLost,
    Unavailable,
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        if matches!(error, Error::Lost { .. }) {
            Self::LockLost
        } else {
            Self::Unavailable
        }
    }
}

impl BoxOffice {
    async fn sell(&self, seat: u32, buyer: &str) -> Result<(), Refusal> {
        let lock = self.locks.reentrant_lock(format!("seat:{seat}"))?;
        let guard = lock
            .try_lock_for(Duration::from_secs(2))
            .await?
            .ok_or(Refusal::Busy)?;
        if self.sold.lock().unwrap().contains_key(&seat) {
            return Err(Refusal::SoldAlready);
        }
        // stops early if another office could sell this seat meanwhile
        guard.run_until_lost(self.payments.take()).await?;
        self.sold.lock().unwrap().insert(seat, buyer.to_owned());
        guard.unlock().await?;
        Ok(())
    }
}

/// A slow payment service: it waits until the test lets it continue.
#[derive(Clone, Default)]
struct Payments {
    taken: Arc<AtomicU32>,
    asked: Arc<Notify>,
    slow: Option<watch::Receiver<bool>>,
}

impl Payments {
    async fn take(&self) {
        self.asked.notify_one();
        if let Some(mut slow) = self.slow.clone() {
            let _ = slow.wait_for(|slow| !slow).await;
        }
        self.taken.fetch_add(1, Ordering::Relaxed);
    }
}

async fn box_office(server: &EmbeddedServer, sold: &Sold, payments: &Payments) -> BoxOffice {
    // a short watchdog timeout, so that a loss is noticed soon: at the next renewal, at most 200 ms later
    let locks = LockClient::builder().watchdog_timeout(Duration::from_millis(600));
    let locks = locks.connect(server.url()).await.unwrap();
    BoxOffice {
        locks,
        sold: Arc::clone(sold),
        payments: payments.clone(),
    }
}

#[tokio::test]
async fn a_seat_is_sold_once_however_many_want_it() {
    let server = EmbeddedServer::start().unwrap();
    let (sold, payments) = (Sold::default(), Payments::default());
    let mut buyers = Vec::new();
    for number in 0..20 {
        // as on several machines: each office has its own client
        let office = box_office(&server, &sold, &payments).await;
        buyers.push(tokio::spawn(async move {
            office.sell(7, &format!("buyer {number}")).await
        }));
    }
    let mut happy = 0;
    for buyer in buyers {
        match buyer.await.unwrap() {
            Ok(()) => happy += 1,
            Err(refusal) => assert_eq!(refusal, Refusal::SoldAlready),
        }
    }
    assert_eq!(happy, 1);
    assert_eq!(payments.taken.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn a_sale_whose_lock_is_lost_is_not_made() {
    let server = EmbeddedServer::start().unwrap();
    let (release, slow) = watch::channel(true);
    let (sold, payments) = (
        Sold::default(),
        Payments {
            slow: Some(slow),
            ..Payments::default()
        },
    );
    let office = box_office(&server, &sold, &payments).await;

    let sale = tokio::spawn(async move { office.sell(7, "slow buyer").await });
    payments.asked.notified().await;
    // the lease ends while the holder lives, as if the holder had been paused for a minute
    server.advance(Duration::from_secs(60));
    assert_eq!(sale.await.unwrap(), Err(Refusal::LockLost));
    assert!(sold.lock().unwrap().is_empty());
    assert_eq!(payments.taken.load(Ordering::Relaxed), 0);
    drop(release);
}

#[tokio::test]
async fn a_buyer_who_waits_too_long_gets_an_error() {
    let server = EmbeddedServer::start().unwrap();
    let (release, slow) = watch::channel(true);
    let (sold, payments) = (
        Sold::default(),
        Payments {
            slow: Some(slow),
            ..Payments::default()
        },
    );
    let (first, second) = (
        box_office(&server, &sold, &payments).await,
        box_office(&server, &sold, &payments).await,
    );

    let sale = tokio::spawn(async move { first.sell(7, "slow buyer").await });
    payments.asked.notified().await;
    assert_eq!(second.sell(7, "second buyer").await, Err(Refusal::Busy));
    release.send(false).unwrap();
    assert_eq!(sale.await.unwrap(), Ok(()));
    assert_eq!(
        second.sell(7, "second buyer").await,
        Err(Refusal::SoldAlready)
    );
}

#[tokio::test]
async fn an_outage_sells_nothing_and_the_service_comes_back() {
    let server = EmbeddedServer::start().unwrap();
    let port = server.addr().port();
    let (sold, payments) = (Sold::default(), Payments::default());
    let office = box_office(&server, &sold, &payments).await;
    drop(server);
    assert_eq!(office.sell(7, "buyer").await, Err(Refusal::Unavailable));
    assert!(sold.lock().unwrap().is_empty());

    let _server = EmbeddedServer::start_on(port).unwrap();
    assert_eq!(office.sell(7, "buyer").await, Ok(()));
}
