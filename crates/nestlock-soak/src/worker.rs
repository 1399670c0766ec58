//! A worker process: its clients and tasks, the calm at the end, and what is left then.

use std::{fs, io::BufRead, path::PathBuf, sync::Arc, time::Duration};

use nestlock::LockClient;
use tokio::sync::mpsc;

use crate::{
    clock::now,
    handover::{self, Mailbox},
    heartbeat,
    history::History,
    process::{Connected, Process},
    settings::{FAIR_PATIENCE, OUTAGE_PATIENCE, POLL_CAP, Settings},
    task::Task,
    topology::{CLIENTS, SERVERS, link},
};

/// Runs a worker. It reports its progress on stdout, and reads orders from stdin.
pub(crate) fn run(settings: &Settings) -> bool {
    end_with_the_parent();
    let settings = settings.clone();
    let (slot, generation): (usize, usize) = (settings.told("slot"), settings.told("generation"));
    let folder: PathBuf = settings.told("folder");
    let name = format!("s{slot}g{generation}");
    let history =
        Arc::new(History::open(&folder.join(format!("{name}.history"))).expect("a history"));
    heartbeat::of_the_process(Arc::clone(&history));
    let mailbox = Mailbox(handover::folder(&folder));
    let until = settings.told("until");
    let process = Arc::new(Process::new(settings, history, mailbox, until, name));
    let (sender, orders) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
        // the parent process is gone
        std::process::exit(3);
    });
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    runtime
        .expect("a runtime")
        .block_on(live(process, slot, orders));
    true
}

/// Makes the kernel kill this process when the thread that started it ends: a stopped process does
/// not see the end of its stdin.
fn end_with_the_parent() {
    #[cfg(target_os = "linux")]
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL).expect("a signal");
}

async fn live(process: Arc<Process>, slot: usize, mut orders: mpsc::UnboundedReceiver<String>) {
    tokio::spawn(heartbeat::of_the_runtime(Arc::clone(&process.history)));
    let mut clients = Vec::new();
    for client in slot * CLIENTS..(slot + 1) * CLIENTS {
        clients.push(connect(&process, client).await);
    }
    let before = Resources::now();
    println!("ready");
    let mut tasks = Vec::new();
    for client in &clients {
        for task in 0..process.settings.tasks {
            tasks.push(Task::new(Arc::clone(&process), client.clone(), task as u64));
        }
    }
    let mut running: Vec<_> = tasks
        .into_iter()
        .map(|mut task| {
            tokio::spawn(async move {
                task.work().await;
                task
            })
        })
        .collect();
    // until all tasks have ended, the nemesis may order to block the runtime
    let mut settled = Vec::new();
    while let Some(task) = running.pop() {
        tokio::pin!(task);
        let task = loop {
            tokio::select! {
                task = &mut task => break task.expect("a task does not panic"),
                order = orders.recv() => block(order.as_deref()),
            }
        };
        settled.push(task);
    }
    println!("settled");
    while orders.recv().await.is_some_and(|order| order != "calm") {}
    let calm: Vec<_> = settled
        .into_iter()
        .map(|task| tokio::spawn(task.calm()))
        .collect();
    for task in calm {
        task.await.expect("a task does not panic");
    }
    println!("calmed");
    for client in clients.iter().flat_map(|client| &client.servers) {
        if tokio::time::timeout(Duration::from_secs(10), client.idle())
            .await
            .is_err()
        {
            println!("wrong: idle() does not return: {:?}", client.stats());
        }
    }
    let mut looks = 0;
    loop {
        let left: Vec<_> = clients
            .iter()
            .flat_map(|client| &client.servers)
            .map(LockClient::stats)
            .collect();
        if left
            .iter()
            .all(|stats| (stats.holds, stats.settling, stats.channels) == (0, 0, 0))
        {
            break;
        }
        looks += 1;
        if looks > 40 {
            println!("wrong: clients that do not become idle: {left:?}");
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    before.compare(&Resources::now());
    println!("idle");
    while orders.recv().await.is_some_and(|order| order != "end") {}
    for client in clients.iter().flat_map(|client| &client.servers) {
        if let Err(error) = client.shutdown().await {
            println!("wrong: shutdown: {error}");
        }
    }
    println!("ended");
}

/// Blocks all workers of the runtime for the ordered time. The client's own thread is not blocked.
fn block(order: Option<&str>) {
    let Some(ms) = order
        .and_then(|order| order.strip_prefix("block "))
        .and_then(|ms| ms.parse().ok())
    else {
        return;
    };
    for _ in 0..2 {
        tokio::spawn(async move { std::thread::sleep(Duration::from_millis(ms)) });
    }
}

async fn connect(process: &Process, client: usize) -> Connected {
    let urls: String = process.settings.told(&format!("urls{client}"));
    let watchdog = process.settings.watchdog(client);
    let name = format!("{}c{}", process.name, client % CLIENTS);
    let mut servers = Vec::new();
    for url in urls.split('+') {
        let server = loop {
            let builder = LockClient::builder()
                .watchdog_timeout(watchdog)
                .poll_cap(POLL_CAP)
                .outage_patience(OUTAGE_PATIENCE)
                .fair_patience(FAIR_PATIENCE)
                .connect_timeout(Duration::from_secs(1));
            match builder.connect(url).await {
                Ok(client) => break client,
                // the process was started during a fault
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        };
        servers.push(server);
    }
    assert_eq!(servers.len(), SERVERS);
    let link = link(client).map_or("-".to_owned(), |link| link.to_string());
    process.history.write_at(
        now(),
        format_args!("conf {name} {} {link}", watchdog.as_millis()),
    );
    Connected {
        name,
        servers,
        watchdog,
    }
}

/// The resources that a process uses.
#[derive(Debug)]
struct Resources {
    threads: usize,
    files: usize,
    kilobytes: usize,
}

impl Resources {
    /// Reads the current values: all 0 on a system without `/proc`.
    fn now() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|line| line.split_whitespace().next()?.parse().ok())
                .unwrap_or(0)
        };
        let files = fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
        Self {
            threads: field("Threads:"),
            files,
            kilobytes: field("VmRSS:"),
        }
    }

    fn compare(&self, after: &Self) {
        // each client may have two more connections per server: for lists, and one being replaced
        let connections = 2 * CLIENTS * SERVERS;
        if after.threads > self.threads + 4 || after.files > self.files + connections {
            println!("wrong: threads or descriptors have grown: {self:?}, now {after:?}");
        }
        if after.kilobytes > self.kilobytes + 64 * 1024 {
            println!("wrong: memory has grown: {self:?}, now {after:?}");
        }
        println!("resources {self:?} {after:?}");
    }
}
