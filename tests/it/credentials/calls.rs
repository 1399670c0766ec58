//! Calls of the function for credentials that take long, or hang.

use super::*;

const HANGS: Duration = Duration::from_secs(3_600);

fn app(password: &str) -> Credentials {
    Credentials::new("app", password)
}

/// Returns a function whose n-th call takes this long and returns this. Counts the calls.
fn function(
    plan: impl Fn(u32) -> (Duration, Credentials) + Send + Sync + Clone + 'static,
) -> (impl Fn() -> Slow + Clone, Arc<AtomicU32>) {
    let calls = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&calls);
    let fetch = move || {
        let (takes, credentials) = plan(count.fetch_add(1, Ordering::AcqRel) + 1);
        let fetch: Slow = Box::pin(async move {
            tokio::time::sleep(takes).await;
            Ok(credentials)
        });
        fetch
    };
    (fetch, calls)
}

/// Starts a server whose user `app` has these passwords.
fn server(passwords: &[&str]) -> Server {
    let server = Server::start_real();
    allow(&mut server.wire(), passwords);
    server
}

fn allow(wire: &mut Wire, passwords: &[&str]) {
    let passwords = passwords.iter().map(|password| format!(">{password}"));
    let rules = ["ACL", "SETUSER", "app", "on", "~*", "&*", "+@all"].map(str::to_owned);
    let words: Vec<_> = rules.into_iter().chain(passwords).collect();
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    wire.call(&words).unwrap();
}

/// The connections are cut when the lease has hardly more than 2 s left, and the call of the
/// reconnect hangs: another call is made in time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_hangs_once_costs_no_lock() {
    let server = server(&["pw"]);
    let (fetch, calls) = function(|n| (if n == 2 { HANGS } else { Duration::ZERO }, app("pw")));
    let client = LockClient::builder()
        .watchdog_timeout(ms(3_000))
        .outage_patience(ms(60_000))
        .credentials(fetch)
        .connect(format!("redis://{}", server.addr()))
        .await
        .unwrap();
    let guard = client.mutex("l").unwrap().lock().await.unwrap();
    // the first call serves the connections of its next 5 s
    tokio::time::sleep(ms(5_200)).await;
    while server.pttl("l") > 2_150 {
        tokio::time::sleep(ms(5)).await;
    }
    for connections in ["normal", "pubsub"] {
        let kill = ["CLIENT", "KILL", "TYPE", connections];
        server.wire().call(&kill).unwrap();
    }
    let lost = tokio::time::timeout(ms(5_000), guard.lost()).await;
    assert!(lost.is_err(), "{lost:?}, calls: {calls:?}");
    guard.unlock().await.unwrap();
    client.shutdown().await.unwrap();
}

/// A master takes the first token and the second, another one only the second, and a call takes
/// longer than an address has once a master is known. Both masters are found.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_token_hides_no_second_master() {
    let (one, two) = (server(&["t1", "t2"]), server(&["t2"]));
    let (fetch, _) = function(|n| (ms(800), app(if n == 1 { "t1" } else { "t2" })));
    assert_finds_both(LockClient::builder().credentials(fetch), [&one, &two]).await;
}

/// Sentinels without users need no credentials. While no call returns, they are restarted and name
/// another master: the holder at the old one is told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_without_users_need_no_call() {
    let group = tokio::task::block_in_place(|| sentinel::start(0, 1));
    let (master, other) = (group.servers()[0].addr(), server(&["pw"]));
    allow(&mut Wire::connect(master).unwrap(), &["pw"]);
    let (fetch, calls) = function(|n| (if n == 1 { Duration::ZERO } else { HANGS }, app("pw")));
    let client = LockClient::builder()
        .watchdog_timeout(ms(3_000))
        .credentials(fetch)
        .connect(group.url())
        .await
        .unwrap();
    let guard = client.mutex("l").unwrap().lock().await.unwrap();
    assert_eq!(calls.load(Ordering::Acquire), 1);
    // the first call serves the connections of its next 5 s
    tokio::time::sleep(ms(5_200)).await;
    let sentinel = &group.sentinels()[0];
    tokio::task::block_in_place(|| {
        sentinel.kill().unwrap();
        sentinel.restart().unwrap();
    });
    assert_told_of(other.addr(), sentinel.addr(), &guard).await;
}

/// The nodes announce an address that accepts connections and never replies. The error does not
/// blame the function, which takes less than a quarter of the time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_error_of_a_cluster_blames_no_slow_function() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let cluster = nestlock_embedded::SpawnedCluster::start(1, 0).unwrap();
    let node = cluster.nodes()[0].addr();
    let mut wire = Wire::connect(node).unwrap();
    allow(&mut wire, &["pw"]);
    let port = silent.local_addr().unwrap().port().to_string();
    wire.call(&["CONFIG", "SET", "cluster-announce-port", &port])
        .unwrap();
    let (fetch, _) = function(|_| (ms(300), app("pw")));
    let builder = LockClient::builder()
        .connect_timeout(ms(1_500))
        .credentials(fetch);
    let url = format!("redis-cluster://{node}");
    eventually("the node announces it", || async {
        let error = builder.clone().connect(&url).await.unwrap_err().to_string();
        error.contains("no connection within 1.5s") && !error.contains("provider")
    })
    .await;
}

/// A server that never replies, and a function that never returns: the error says which it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_error_names_a_function_that_does_not_return() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = format!("redis://{}", silent.local_addr().unwrap());
    let server = server(&["pw"]);
    for &wire in WIRES {
        for (takes, url) in [(ms(10), &silent), (HANGS, &server.url())] {
            let (fetch, _) = function(move |_| (takes, app("pw")));
            let builder = builder(wire).connect_timeout(ms(1_000)).credentials(fetch);
            let error = builder.connect(url).await.unwrap_err();
            let text = error.to_string();
            let is_named = text.contains("the credential provider has not returned for ");
            assert_eq!(is_named, takes == HANGS, "{wire:?}: {text}");
            assert!(error.is_transient() && text.contains("no connection within 1s"));
        }
    }
}
