//! The handle of a server in this process.

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

/// What the handle asks of the server's thread; each is confirmed.
#[derive(Debug)]
enum Order {
    Advance(Duration),
    Pause,
    Resume,
}

/// A server in this process, at a port of `127.0.0.1`: enough of Redis 7.0 for locks and their tests.
///
/// It runs on a thread of its own and ends, with all that it holds, when this handle is dropped. Whoever connects to
/// its URL shares its locks: tasks of this process, or other processes of this machine for as long as this one lives.
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
    /// Taken by Drop: its end ends the thread.
    orders: Option<Sender<(Order, Sender<()>)>>,
    /// Tells the thread to look at its orders.
    wake: Arc<Notify>,
    /// Ends scripts that would not end by themselves.
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl EmbeddedServer {
    /// Starts a server at a free port.
    ///
    /// # Errors
    /// No port, no thread, or no memory.
    pub fn start() -> io::Result<Self> {
        Self::run(crate::ports::listen()?)
    }

    /// Starts a server at the given port of `127.0.0.1`, to come back after an outage for example.
    ///
    /// # Errors
    /// The port is taken; or no thread, or no memory.
    pub fn start_on(port: u16) -> io::Result<Self> {
        Self::run(TcpListener::bind((Ipv4Addr::LOCALHOST, port))?)
    }

    fn run(listener: TcpListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let addr = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (orders, inbox) = mpsc::channel();
        let (started, outcome) = mpsc::channel();
        let (wake, stop) = (Arc::new(Notify::new()), Arc::new(AtomicBool::new(false)));
        let (woken, stopped) = (Arc::clone(&wake), Arc::clone(&stop));
        let thread =
            std::thread::Builder::new().name(format!("nestlock-embedded-{}", addr.port())).spawn(move || {
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
        outcome.recv().unwrap_or_else(|_| Err(io::Error::other("the server's thread has ended")))?;
        Ok(Self { addr, orders: Some(orders), wake, stop, thread: Some(thread) })
    }

    /// Where clients connect: `redis://127.0.0.1:<port>`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis://{}", self.addr)
    }

    /// The address of its port.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Puts the server's clock forward: keys and leases that end within this time are gone when it returns.
    ///
    /// The clocks of clients do not move. A client with a watchdog learns of its loss with its next renewal, which
    /// comes after a third of its watchdog timeout.
    pub fn advance(&self, by: Duration) {
        self.order(Order::Advance(by));
    }

    /// Makes the server hang: its port and connections stay open, nobody is answered. As SIGSTOP does to a process.
    pub fn pause(&self) {
        self.order(Order::Pause);
    }

    /// Ends a [`pause`](Self::pause): what was asked meanwhile is answered.
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

/// Carries out orders until the handle is gone.
async fn obey(engine: &Engine, inbox: Receiver<(Order, Sender<()>)>, wake: &Notify) {
    let mut paused = false;
    loop {
        // paused: waits for the next order with the whole thread, so that nothing else runs
        let next = if paused { inbox.recv().map_err(|_| TryRecvError::Disconnected) } else { inbox.try_recv() };
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
