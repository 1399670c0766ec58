//! The handle of an emulated server in this process.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver, Sender, TryRecvError},
    },
    thread::JoinHandle,
    time::Duration,
};

use tokio::sync::Notify;

use crate::server::{Engine, port};

/// An order from the handle to the server's thread, which confirms each one.
#[derive(Debug)]
enum Order {
    Advance(Duration),
    Pause,
    Resume,
}

/// A server in this process, on a port of `127.0.0.1`: enough of Redis 7.0 for locks and their
/// tests.
///
/// It runs on its own thread. When this handle is dropped, the server ends and its data is lost.
/// All clients of its URL share its locks: tasks of this process, or other processes on this
/// machine while this process lives.
///
/// ```
/// # fn main() -> std::io::Result<()> {
/// let server = nestlock_embedded::EmbeddedServer::start()?;
/// println!("{}", server.url()); // redis://127.0.0.1:<port>
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct EmbeddedServer {
    addr: SocketAddr,
    /// `None` once dropped, which ends the thread.
    orders: Option<Sender<(Order, Sender<()>)>>,
    /// Wakes the thread to read its orders.
    wake: Arc<Notify>,
    /// Aborts scripts that would not end on their own.
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl EmbeddedServer {
    /// Starts a server on a free port.
    ///
    /// # Errors
    /// There is no free port, or a thread or memory cannot be allocated.
    pub fn start() -> io::Result<Self> {
        Self::run(crate::ports::listen()?)
    }

    /// Starts a server on the given port of `127.0.0.1`, for example to come back after an outage.
    ///
    /// # Errors
    /// The port is taken, or a thread or memory cannot be allocated.
    pub fn start_on(port: u16) -> io::Result<Self> {
        Self::run(TcpListener::bind((Ipv4Addr::LOCALHOST, port))?)
    }

    fn run(listener: TcpListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let addr = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let (orders, inbox) = mpsc::channel();
        let (started, outcome) = mpsc::channel();
        let (wake, stop) = (Arc::new(Notify::new()), Arc::new(AtomicBool::new(false)));
        let (woken, stopped) = (Arc::clone(&wake), Arc::clone(&stop));
        let thread = std::thread::Builder::new()
            .name(format!("nestlock-embedded-{}", addr.port()))
            .spawn(move || {
                let engine = match Engine::new(addr.port(), stopped) {
                    Ok(engine) => Rc::new(engine),
                    Err(text) => {
                        let _ = started.send(Err(io::Error::other(text)));
                        return;
                    }
                };
                let local = tokio::task::LocalSet::new();
                local.block_on(&runtime, async {
                    match tokio::net::TcpListener::from_std(listener) {
                        Ok(listener) => {
                            let _ = started.send(Ok(()));
                            tokio::select! {
                                () = obey(&engine, inbox, &woken) => {}
                                () = port::serve(Rc::clone(&engine), listener) => {}
                            }
                        }
                        Err(error) => {
                            let _ = started.send(Err(error));
                        }
                    }
                });
            })?;
        outcome
            .recv()
            .unwrap_or_else(|_| Err(io::Error::other("the server's thread has ended")))?;
        Ok(Self {
            addr,
            orders: Some(orders),
            wake,
            stop,
            thread: Some(thread),
        })
    }

    /// Returns the URL that clients connect to: `redis://127.0.0.1:<port>`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis://{}", self.addr)
    }

    /// Returns the address that clients connect to.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Advances the server's clock: keys and leases that expire within this time are gone when it
    /// returns.
    ///
    /// The clocks of clients do not move. A client with a watchdog notices its loss at the next
    /// renewal, after a third of its watchdog timeout.
    pub fn advance(&self, by: Duration) {
        self.order(Order::Advance(by));
    }

    /// Makes the server hang, as SIGSTOP does to a process: its port and connections stay open, but
    /// it sends no replies.
    pub fn pause(&self) {
        self.order(Order::Pause);
    }

    /// Ends a [`pause`](Self::pause): requests sent during the pause get their replies.
    pub fn resume(&self) {
        self.order(Order::Resume);
    }

    fn order(&self, order: Order) {
        let (done, confirmation) = mpsc::channel();
        if let Some(orders) = &self.orders
            && orders.send((order, done)).is_ok()
        {
            self.wake.notify_one();
            let _ = confirmation.recv();
        }
    }
}

impl Drop for EmbeddedServer {
    /// Closes the port and all connections, and waits for that.
    fn drop(&mut self) {
        self.orders = None;
        self.stop.store(true, Ordering::Relaxed);
        self.wake.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Carries out orders until the handle is dropped.
async fn obey(engine: &Engine, inbox: Receiver<(Order, Sender<()>)>, wake: &Notify) {
    let mut paused = false;
    loop {
        // while paused, block the whole thread: otherwise the connections' tasks would still run
        let next = if paused {
            inbox.recv().map_err(|_| TryRecvError::Disconnected)
        } else {
            inbox.try_recv()
        };
        match next {
            Ok((order, done)) => {
                match order {
                    Order::Advance(by) => engine.advance(by),
                    Order::Pause => paused = true,
                    Order::Resume => paused = false,
                }
                let _ = done.send(());
            }
            Err(TryRecvError::Empty) => wake.notified().await,
            Err(TryRecvError::Disconnected) => return,
        }
    }
}
