//! A link with a configurable round trip: bytes that are read from one side are written to the
//! other half a round trip later.
#![allow(unreachable_pub)]

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    runtime::Builder,
    sync::mpsc,
    time::{Instant, sleep_until},
};

pub struct Far {
    addr: SocketAddr,
    half_us: Arc<AtomicU64>,
}

impl Far {
    /// A link to the server at `to`, at first without a delay. It lasts until the process ends, on
    /// its own thread.
    pub fn start(to: SocketAddr) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.set_nonblocking(true).expect("a socket");
        let addr = listener.local_addr().expect("an address");
        let half_us = Arc::new(AtomicU64::new(0));
        let half = Arc::clone(&half_us);
        std::thread::spawn(move || {
            let runtime = Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(async {
                let listener = TcpListener::from_std(listener).expect("a socket");
                while let Ok((near, _)) = listener.accept().await {
                    let Ok(far) = TcpStream::connect(to).await else {
                        continue;
                    };
                    let _ = (near.set_nodelay(true), far.set_nodelay(true));
                    let ((near_in, near_out), (far_in, far_out)) =
                        (near.into_split(), far.into_split());
                    tokio::spawn(carry(near_in, far_out, Arc::clone(&half)));
                    tokio::spawn(carry(far_in, near_out, Arc::clone(&half)));
                }
            });
        });
        Self { addr, half_us }
    }

    pub fn url(&self) -> String {
        format!("redis://{}", self.addr)
    }

    pub fn round_trip(&self, round_trip: Duration) {
        self.half_us.store(
            u64::try_from(round_trip.as_micros() / 2).expect("short"),
            Ordering::Relaxed,
        );
    }
}

async fn carry(
    mut from: impl AsyncReadExt + Unpin + Send + 'static,
    mut to: impl AsyncWriteExt + Unpin + Send + 'static,
    half_us: Arc<AtomicU64>,
) {
    let (sender, mut pieces) = mpsc::unbounded_channel::<(Instant, Vec<u8>)>();
    tokio::spawn(async move {
        while let Some((at, piece)) = pieces.recv().await {
            sleep_until(at).await;
            if to.write_all(&piece).await.is_err() {
                return;
            }
        }
        let _ = to.shutdown().await;
    });
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(count) = from.read(&mut buffer).await {
        let at = Instant::now() + Duration::from_micros(half_us.load(Ordering::Relaxed));
        if count == 0 || sender.send((at, buffer[..count].to_vec())).is_err() {
            return;
        }
    }
}
