//! What the benches share: a server, a bare fred client for comparison, and figures as ratios
//! within one run.
#![allow(dead_code, unreachable_pub)]

pub mod far;
pub mod scripts;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use far::Far;
use fred::{
    clients::Client,
    interfaces::ClientLike,
    types::{Builder, config::Config},
};
use nestlock::{Lock, LockClient};
use nestlock_embedded::SpawnedServer;

/// A real server, as the figures apply to no other.
pub struct Server {
    url: String,
    _ours: Option<SpawnedServer>,
}

impl Server {
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns two links, for figures that should not depend on distance: as near as possible, and
    /// slow.
    pub fn links(&self) -> [Link; 2] {
        let addr = self
            .url
            .trim_start_matches("redis://")
            .trim_end_matches('/');
        let far = Far::start(addr.parse().expect("redis://address:port"));
        [
            Link {
                url: self.url.clone(),
                far: None,
            },
            Link {
                url: far.url(),
                far: Some(far),
            },
        ]
    }
}

/// A link to the server.
pub struct Link {
    pub url: String,
    far: Option<Far>,
}

impl Link {
    const ROUND_TRIP: Duration = Duration::from_millis(50);

    pub fn is_far(&self) -> bool {
        self.far.is_some()
    }

    /// Sets the round trip. Before, there is no delay, so many holds are acquired quickly.
    pub fn slow_down(&self) {
        if let Some(far) = &self.far {
            far.round_trip(Self::ROUND_TRIP);
        }
    }

    pub fn speed_up(&self) {
        if let Some(far) = &self.far {
            far.round_trip(Duration::ZERO);
        }
    }

    /// Waits for this time, and on a slow link also for four round trips: to try, to subscribe, to
    /// try again.
    pub async fn pause(&self, long: Duration) {
        tokio::time::sleep(
            long + if self.is_far() {
                Self::ROUND_TRIP * 4
            } else {
                Duration::ZERO
            },
        )
        .await;
    }

    /// Prints one figure with its bound and the distance of the server.
    pub fn report(&self, what: &str, figure: f64, bound: &str) {
        let what = if self.is_far() {
            format!("{what}; 50 ms away")
        } else {
            what.to_owned()
        };
        report(&what, figure, bound);
    }
}

/// Returns the server in `NESTLOCK_URL`, or starts a private one.
pub fn server() -> Server {
    if let Some(url) = std::env::var_os("NESTLOCK_URL") {
        return Server {
            url: url.into_string().expect("a URL"),
            _ours: None,
        };
    }
    let server = SpawnedServer::start().unwrap_or_else(|error| panic!("{error}"));
    Server {
        url: server.url(),
        _ours: Some(server),
    }
}

/// Returns fred as a program uses it without nestlock, driven by the caller's runtime.
pub async fn bare(url: &str) -> Client {
    let mut builder = Builder::from_config(Config::from_url(url).expect("a URL"));
    builder.with_connection_config(|connection| {
        connection.max_command_attempts = 1;
        connection.tcp.nodelay = Some(true);
    });
    builder.with_performance_config(|performance| {
        performance.default_command_timeout = Duration::from_secs(3);
    });
    let client = builder.build().expect("a client");
    client.init().await.expect("a connection");
    client
}

/// Runs tasks with one lock each for this time. Returns pairs per second.
pub async fn pairs(client: &LockClient, tasks: usize, time: Duration) -> f64 {
    let (over, from) = (Arc::new(AtomicBool::new(false)), Instant::now());
    let run = |task: usize| {
        let (client, over) = (client.clone(), Arc::clone(&over));
        tokio::spawn(async move {
            let lock = client
                .reentrant_lock(format!("lock:{task}"))
                .expect("a name");
            let mut pairs = 0;
            while !over.load(Ordering::Relaxed) {
                lock.lock()
                    .await
                    .expect("the lock")
                    .unlock()
                    .await
                    .expect("the unlock");
                pairs += 1;
            }
            pairs
        })
    };
    let running: Vec<_> = (0..tasks).map(run).collect();
    tokio::time::sleep(time).await;
    over.store(true, Ordering::Relaxed);
    let mut pairs = 0;
    for task in running {
        pairs += task.await.expect("a task");
    }
    f64::from(pairs) / from.elapsed().as_secs_f64()
}

/// Measures from the call of `unlock` in one client until `lock` returns in another that waits. Returns
/// seconds.
pub async fn hand_over(from: Lock, to: Lock) -> f64 {
    let guard = from.lock().await.expect("the lock");
    let waiter = tokio::spawn(async move {
        let guard = to.lock().await.expect("the lock");
        let returned = Instant::now();
        guard.unlock().await.expect("the unlock");
        returned
    });
    // the waiter needs four round trips to subscribe and to try again
    tokio::time::sleep(Duration::from_millis(5)).await;
    let start = Instant::now();
    guard.unlock().await.expect("the unlock");
    waiter
        .await
        .expect("a task")
        .duration_since(start)
        .as_secs_f64()
}

pub fn quantile(samples: &mut [f64], q: f64) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[((samples.len() - 1) as f64 * q).round() as usize]
}

pub fn median(samples: &mut [f64]) -> f64 {
    quantile(samples, 0.5)
}

/// Prints one figure with its bound.
pub fn report(what: &str, figure: f64, bound: &str) {
    println!("{what:<88} {figure:>9.2}   {bound}");
}

/// Returns the resident memory of this process, in bytes.
pub fn resident() -> f64 {
    let status = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages: f64 = status
        .split(' ')
        .nth(1)
        .expect("a second field")
        .parse()
        .expect("a number");
    pages * 4096.0
}
