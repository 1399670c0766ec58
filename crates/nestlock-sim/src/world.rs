//! The world: which processes run, how they start and end, and the time that passes for them.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use crate::{
    app::app,
    checks,
    clock::{MILLI, now},
    kernel,
    ledger::book,
    net::{self, Cut},
    orders::Orders,
    plan::{MOST_PROCESSES, Plan},
    process::as_process,
};

/// The running processes.
#[derive(Debug, Default)]
pub(crate) struct World {
    pub(crate) alive: Vec<usize>,
    last: usize,
    orders: BTreeMap<usize, Arc<Orders>>,
}

impl World {
    /// Starts a process.
    pub(crate) fn boot(&mut self, plan: &Plan) {
        self.last += 1;
        let process = self.last;
        self.alive.push(process);
        let urls: Vec<String> = (0..plan.kind.servers())
            .map(|server| {
                let path = format!("/process-{process}/server-{server}");
                net::listen(&path, process, server);
                format!("redis+unix://{path}")
            })
            .collect();
        let orders = Arc::new(Orders::default());
        self.orders.insert(process, Arc::clone(&orders));
        let plan = plan.clone();
        as_process(process, || {
            std::thread::spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build();
                runtime
                    .expect("a runtime")
                    .block_on(app(urls, process, plan, orders));
            });
        });
    }

    /// Kills a process and starts another one in its place, unless that exceeds [`MOST_PROCESSES`].
    /// Its requests in flight are executed from the time `late` on.
    pub(crate) fn crash(&mut self, plan: &Plan, process: usize, late: u64) {
        if self.last + 1 >= MOST_PROCESSES {
            return;
        }
        kernel::kill(process);
        (0..plan.kind.servers()).for_each(|server| net::cut(process, server, Cut::Late(late)));
        book(|book| book.crash(process));
        self.alive.retain(|alive| *alive != process);
        self.boot(plan);
    }

    pub(crate) fn shut_down(&self, process: usize) {
        self.orders[&process].shut_down.notify_one();
    }

    /// Lets `time` nanoseconds pass, and runs the checks every 20 ms.
    pub(crate) async fn sleep(&mut self, plan: &Plan, time: u64) {
        let until = now() + time;
        while now() < until {
            tokio::time::sleep(Duration::from_nanos((until - now()).min(20 * MILLI))).await;
            net::with(net::Net::accept_scripts_again);
            checks::look(plan);
        }
    }
}
