//! Two clients of one embedded server, as if on two machines.

use std::{future::Future, time::Duration};

use nestlock::LockClient;
use nestlock_embedded::EmbeddedServer;

use crate::support::poll_times;

pub struct Stage {
    pub server: EmbeddedServer,
    pub locks: LockClient,
    /// A client that could be on another machine.
    pub other: LockClient,
}

impl Stage {
    pub async fn new() -> Self {
        let server = EmbeddedServer::start().unwrap();
        let builder = LockClient::builder()
            .watchdog_timeout(Duration::from_millis(600))
            .command_timeout(Duration::from_millis(200));
        let locks = builder.connect(server.url()).await.unwrap();
        let other = LockClient::connect(server.url()).await.unwrap();
        Self {
            server,
            locks,
            other,
        }
    }

    pub async fn is_locked(&self, name: &str) -> bool {
        self.other.mutex(name).unwrap().is_locked().await.unwrap()
    }

    pub async fn free(&self, name: &str) {
        assert!(
            self.other
                .mutex(name)
                .unwrap()
                .force_unlock()
                .await
                .unwrap(),
            "{name} is not held"
        );
    }

    /// Drops `call` after one poll, after two, and so on, until it ends before. Each time another
    /// client must be able to acquire `lock` as soon as `locks` has settled the drop. If
    /// `contended`, another client holds the lock first, for a moment.
    pub async fn at_every_poll<F: Future>(
        &self,
        lock: &str,
        contended: bool,
        call: impl Fn() -> F,
    ) {
        let lock = self.other.mutex(lock).unwrap();
        let (mut polls, mut ends, mut drops) = (1, 0, 0);
        // the number of polls differs from run to run
        while ends < 4 {
            assert!(polls < 300, "it never ends");
            let holder = if contended {
                let guard = lock.lock().await.unwrap();
                Some(tokio::spawn(async move {
                    tokio::task::yield_now().await;
                    guard.unlock().await
                }))
            } else {
                None
            };
            let ended = poll_times(call(), polls).await.is_some();
            ends += u32::from(ended);
            drops += u32::from(!ended);
            if let Some(holder) = holder {
                holder.await.unwrap().unwrap();
            }
            self.locks.idle().await;
            let guard = lock.try_lock().await.unwrap();
            guard
                .unwrap_or_else(|| panic!("after {polls} polls it is held"))
                .unlock()
                .await
                .unwrap();
            polls += 1;
        }
        assert!(
            drops >= 2,
            "it was dropped {drops} times only: it never waits"
        );
        assert_eq!(self.locks.stats().holds, 0);
    }
}
