//! The errors of a connect, one test for each row of the table in src/guide/errors.md.
//! tls/refused.rs has those of TLS.

use std::{
    io::{Read, Write},
    net::TcpListener,
    process::Command,
    thread,
    time::Duration,
};

use nestlock::{Error, LockClient, LockClientBuilder, StoreErrorKind, Tuning, Wire};
use nestlock_embedded::SpawnedCluster;

use crate::support::{Server, WIRES, eventually, wire::Wire as Resp};

/// Set in the child process that has few file descriptors, to the URL of its server.
const FEW: &str = "NESTLOCK_TEST_FEW_DESCRIPTORS";

pub fn builder(wire: Wire) -> LockClientBuilder {
    LockClient::builder()
        .tuning(Tuning {
            wire,
            ..Tuning::default()
        })
        .connect_timeout(Duration::from_secs(5))
}

/// Asserts that a connect error has this kind, transience and advice, and that nothing was
/// executed.
#[track_caller]
pub fn assert_told(error: &Error, kind: StoreErrorKind, is_transient: bool, advice: &str) {
    let Error::Connect { source, .. } = error else {
        panic!("{error:?}")
    };
    assert_eq!(
        (source.kind(), error.is_transient()),
        (kind, is_transient),
        "{error} {error:?}"
    );
    assert!(!source.may_have_executed(), "{error}");
    assert!(
        error.to_string().contains(advice),
        "{advice:?} is not in: {error}"
    );
}

async fn refused(wire: Wire, url: &str) -> Error {
    builder(wire).connect(url).await.unwrap_err()
}

/// Starts a listener that replies to each request with these bytes, as no server here does. Returns
/// its port.
pub fn responder(answer: &'static str) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            thread::spawn(move || {
                let mut bytes = [0; 4096];
                while let Ok(length @ 1..) = stream.read(&mut bytes) {
                    let requests = String::from_utf8_lossy(&bytes[..length])
                        .matches('*')
                        .count()
                        .max(1); // fred's HELLO has none
                    if stream
                        .write_all(answer.repeat(requests).as_bytes())
                        .is_err()
                    {
                        return;
                    }
                }
            });
        }
    });
    port
}

/// A port without a server is a transient error, because the server may come back.
#[tokio::test]
async fn no_server_is_transient() {
    let dead = Server::start_real();
    dead.kill();
    let folder = tempfile::tempdir().unwrap();
    let nowhere = format!("redis+unix://{}", folder.path().join("none.sock").display());
    for &wire in WIRES {
        let error = refused(wire, &format!("redis://{}", dead.addr())).await;
        assert_told(
            &error,
            StoreErrorKind::Unavailable,
            true,
            "no server listens there",
        );
        assert_told(
            &refused(wire, &nowhere).await,
            StoreErrorKind::Unavailable,
            true,
            "",
        );
        let error = refused(wire, "redis://nestlock-no-such-host.invalid").await;
        assert_told(&error, StoreErrorKind::Unavailable, true, "check its name");
    }
}

#[tokio::test]
async fn silence_is_a_timeout() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    for &wire in WIRES {
        let builder = LockClient::builder()
            .tuning(Tuning {
                wire,
                ..Tuning::default()
            })
            .connect_timeout(Duration::from_millis(300));
        assert_told(
            &builder.connect(&url).await.unwrap_err(),
            StoreErrorKind::Timeout,
            true,
            "no connection within",
        );
    }
}

/// A reply that no Redis server sends is a permanent error that suggests to check the port.
#[tokio::test]
async fn what_no_redis_server_says_is_no_failure_that_passes() {
    let port = responder("HTTP/1.1 400 Bad Request\r\n\r\n");
    let error = refused(Wire::Own, &format!("redis://127.0.0.1:{port}")).await;
    assert_told(
        &error,
        StoreErrorKind::Protocol,
        false,
        "is it the port of a Redis server?",
    );
}

#[tokio::test]
async fn a_missing_login_is_named_in_the_urls_form() {
    let server = Server::start_real();
    server.call(&[
        "ACL", "SETUSER", "u", "reset", "on", ">pw", "~*", "&*", "+@all",
    ]);
    let mut admin = server.wire();
    admin
        .call(&["CONFIG", "SET", "requirepass", "s3cret"])
        .unwrap();
    for &wire in WIRES {
        let error = refused(wire, &format!("redis://{}", server.addr())).await;
        assert_told(
            &error,
            StoreErrorKind::Auth,
            false,
            "redis://user:password@host:port",
        );
        for login in ["u:wr0ng", "nobody:wr0ng", ":wr0ng"] {
            let error = refused(wire, &format!("redis://{login}@{}", server.addr())).await;
            assert_told(
                &error,
                StoreErrorKind::Auth,
                false,
                "special characters as %NN",
            );
            assert!(!format!("{error} {error:?}").contains("wr0ng"), "{error:?}");
        }
    }
}

/// Redis 5 and some proxies reply like this, and quote the password.
#[tokio::test]
async fn a_server_that_is_too_old_is_named_without_the_password() {
    let old = responder(
        "-ERR unknown command `HELLO`, with args beginning with: `3`, `AUTH`, `u`, `s3cret`, \r\n",
    );
    let proxy = responder("-NOPROTO unsupported protocol version\r\n");
    for port in [old, proxy] {
        let error = refused(Wire::Own, &format!("redis://u:s3cret@127.0.0.1:{port}")).await;
        assert_told(
            &error,
            StoreErrorKind::UnknownCommand,
            false,
            "Redis 6.2 or later",
        );
        assert!(
            !format!("{error} {error:?}").contains("s3cret"),
            "{error:?}"
        );
    }
}

/// What a proxy replies to a login, which it quotes; the kind of the error, and a part of its text.
pub const QUOTES: [(&str, StoreErrorKind, &str); 5] = [
    (
        "-ERR I do not understand HELLO 3 AUTH u s3cret\r\n",
        StoreErrorKind::Other,
        "not shown",
    ),
    ("-s3cret?\r\n", StoreErrorKind::Other, "not shown"),
    (
        "-ERR unknown command 's3cret'\r\n",
        StoreErrorKind::UnknownCommand,
        "unknown command",
    ),
    (
        "-WRONGPASS u:s3cret\r\n",
        StoreErrorKind::Auth,
        "special characters as %NN",
    ),
    (
        "-LOADING AUTH u s3cret\r\n",
        StoreErrorKind::Loading,
        "LOADING",
    ),
];

/// Asserts that an error is of this kind, and shows no password.
#[track_caller]
pub fn assert_quotes_none(error: &Error, kind: StoreErrorKind, words: &str) {
    assert_told(error, kind, kind == StoreErrorKind::Loading, words);
    assert!(
        !format!("{error} {error:?}").contains("s3cret"),
        "{error:?}"
    );
}

/// A proxy has error texts of its own, and none of them may reveal the password.
#[tokio::test]
async fn a_proxy_that_quotes_a_login_shows_no_password() {
    for (answer, kind, words) in QUOTES {
        let address = format!("127.0.0.1:{}", responder(answer));
        for &wire in WIRES {
            let error = refused(wire, &format!("redis://u:s3cret@{address}")).await;
            assert_quotes_none(&error, kind, words);
        }
    }
}

#[tokio::test]
async fn a_server_that_is_loading_or_protected_says_so() {
    let loading = responder("-LOADING Redis is loading the dataset in memory\r\n");
    let error = refused(Wire::Own, &format!("redis://127.0.0.1:{loading}")).await;
    assert_told(&error, StoreErrorKind::Loading, true, "");
    let protected = responder(
        "-DENIED Redis is running in protected mode because protected mode is enabled\r\n",
    );
    let error = refused(Wire::Own, &format!("redis://127.0.0.1:{protected}")).await;
    assert_told(&error, StoreErrorKind::Other, false, "set a password there");
}

/// The server closes at once. Its error may be lost on the way, but the failure is transient all
/// the same. If it arrives, it comes with advice.
#[tokio::test]
async fn a_server_with_too_many_clients_is_transient() {
    let server = Server::start_with(&["--maxclients", "1"]);
    let mut only = server.wire();
    let patient = responder("-ERR max number of clients reached\r\n");
    for &wire in WIRES {
        let error = refused(wire, &format!("redis://{}", server.addr())).await;
        assert_told(&error, StoreErrorKind::Unavailable, true, "");
        let error = refused(wire, &format!("redis://127.0.0.1:{patient}")).await;
        assert_told(
            &error,
            StoreErrorKind::Unavailable,
            true,
            "raise `maxclients`",
        );
    }
    only.call(&["CONFIG", "SET", "maxclients", "10"]).unwrap();
    builder(Wire::Own)
        .connect(format!("redis://{}", server.addr()))
        .await
        .unwrap();
}

#[tokio::test]
async fn a_database_that_the_server_lacks_is_final() {
    let server = Server::start_with(&["--databases", "2"]);
    for &wire in WIRES {
        let error = refused(wire, &format!("redis://{}/7", server.addr())).await;
        assert_told(&error, StoreErrorKind::Other, false, "see `databases`");
    }
}

/// As behind NAT, the address that a node announces leads nowhere.
#[tokio::test]
async fn a_cluster_behind_nat_gets_advice_how_to_announce() {
    let cluster = SpawnedCluster::start(1, 0).unwrap();
    let node = cluster.nodes()[0].addr();
    let dead = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let mut wire = Resp::connect(node).unwrap();
    wire.call(&["CONFIG", "SET", "cluster-announce-port", &dead.to_string()])
        .unwrap();
    let named = format!("127.0.0.1:{dead}");
    let is_named = || async {
        let nodes = Resp::connect(node)
            .unwrap()
            .call(&["CLUSTER", "NODES"])
            .unwrap();
        nodes.text().contains(&format!(":{dead}@"))
    };
    eventually("the address is announced", is_named).await;
    let error = refused(Wire::Own, &format!("redis-cluster://{node}")).await;
    assert_told(
        &error,
        StoreErrorKind::Unavailable,
        true,
        "cluster-announce-ip",
    );
    assert!(error.to_string().contains(&named), "{error}");
}

/// A lock whose server is gone reports why there is no connection.
#[tokio::test]
async fn a_lock_without_a_server_says_why() {
    let server = Server::start_real();
    for &wire in WIRES {
        let client = builder(wire)
            .connect(format!("redis://{}", server.addr()))
            .await
            .unwrap();
        let lock = client.mutex("l").unwrap();
        server.kill();
        let says_why = || async {
            match lock.try_lock().await {
                Err(Error::Store { source, .. }) => {
                    let said = source.to_string();
                    source.is_transient()
                        && said.contains(&server.addr().to_string())
                        && said.contains("no server listens")
                }
                _ => false,
            }
        };
        eventually("it says why", says_why).await;
        server.restart();
    }
}

/// Runs child processes with 4 to 31 file descriptors. A connect that fails there is a transient
/// error, not a misuse.
#[test]
fn without_file_descriptors_a_connect_is_transient() {
    if let Ok(url) = std::env::var(FEW) {
        return connect_with_few(&url);
    }
    let server = Server::start_real();
    let (mut told, mut connected) = (String::new(), 0);
    for limit in 4..32 {
        let line = format!(r#"ulimit -n {limit}; exec "$0" "$@""#);
        let test = "connect_errors::without_file_descriptors_a_connect_is_transient";
        let child = Command::new("/bin/sh")
            .args(["-c", &line])
            .arg(std::env::current_exe().unwrap())
            .args([test, "--exact", "--nocapture", "--test-threads=1"])
            .env(FEW, format!("redis://{}", server.addr()))
            .output()
            .unwrap();
        let output = String::from_utf8_lossy(&child.stdout).into_owned();
        connected += output.matches("@connected").count();
        for line in output
            .lines()
            .filter_map(|line| line.split_once("@refused "))
            .map(|(_, said)| said)
        {
            assert!(line.starts_with("Unavailable true "), "{limit}: {line}");
            told += line;
        }
    }
    assert!(told.contains("ulimit -n"), "{told}");
    assert!(connected > 0, "{told}");
}

fn connect_with_few(url: &str) {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
    else {
        return;
    };
    for &wire in WIRES {
        match runtime.block_on(builder(wire).connect(url)) {
            Ok(_) => println!("@connected"),
            Err(Error::Connect { source, .. }) => {
                println!(
                    "@refused {:?} {} {source}",
                    source.kind(),
                    source.is_transient()
                );
            }
            Err(error) => println!("@refused {error:?}"),
        }
    }
}
