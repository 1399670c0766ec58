//! A process: a program that uses nestlock, with its clients and its tasks.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use nestlock::LockClient;

use crate::{
    clock::now,
    kinds::TTL,
    ledger::{Doing, book, count, count_error, does},
    orders::Orders,
    plan::Plan,
    rng::Rng,
    task::Task,
    trace::note,
};

/// Runs one process: connects and runs its tasks, and starts over after a shutdown.
pub(crate) async fn app(urls: Vec<String>, process: usize, plan: Plan, orders: Arc<Orders>) {
    let mut life = 0_u64;
    while now() < plan.end || life == 0 {
        let mut clients = Vec::new();
        for url in &urls {
            loop {
                let builder = LockClient::builder().watchdog_timeout(Duration::from_nanos(TTL));
                match builder.fair_patience(plan.patience()).connect(url).await {
                    Ok(client) => break clients.push(client),
                    Err(error) => count_error(&error),
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
        note("connected", &[process as u8]);
        orders.is_shut_down.store(false, Relaxed);
        book(|book| {
            book.clients
                .extend(clients.iter().map(|client| (process, client.clone())));
        });
        let task = |task| {
            let rng = Rng(plan.seed ^ (process as u64) << 32 ^ task << 48 ^ life << 56);
            let (clients, plan, orders) = (clients.clone(), plan.clone(), Arc::clone(&orders));
            Task {
                who: (process, task),
                clients,
                rng,
                plan,
                orders,
            }
        };
        let is_over = Arc::new(AtomicBool::new(false));
        let heir = plan
            .gives
            .then(|| tokio::spawn(task(plan.kind.tasks()).inherit(Arc::clone(&is_over))));
        let tasks: Vec<_> = (0..plan.kind.tasks())
            .map(|number| {
                does((process, number), Doing::Other("begins".into()));
                tokio::spawn(task(number).run())
            })
            .collect();
        let end = async {
            for task in tasks {
                task.await.expect("a task does not panic");
            }
        };
        tokio::pin!(end);
        tokio::select! {
            () = &mut end => {}
            () = orders.shut_down.notified() => {
                orders.is_shut_down.store(true, Relaxed);
                // if the user's runtime was paused, the order is old and its disturbance may be
                // over
                book(|book| book.disturb([process], now()));
                let names: Vec<_> = clients.iter().map(LockClient::shutdown).collect();
                for outcome in names {
                    if let Err(error) = outcome.await {
                        count_error(&error);
                    }
                }
                count("shut down");
                end.await;
            }
        }
        is_over.store(true, Relaxed);
        if let Some(heir) = heir {
            heir.await.expect("it does not panic");
        }
        book(|book| {
            let is_busy =
                |client: &LockClient| (client.stats().holds, client.stats().settling) != (0, 0);
            book.clients
                .retain(|(other, client)| *other != process || is_busy(client));
        });
        life += 1;
    }
    std::future::pending::<()>().await;
}
