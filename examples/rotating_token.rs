//! A token that expires each second, as those of cloud services do each quarter of an hour: the
//! client fetches the next one in time, and logs in with it over the connection that is open.
//!
//! Run: `cargo run --example rotating_token`  (starts `redis-server` or `valkey-server`)
#![allow(clippy::print_stdout)]

use std::{
    io::{self, BufRead, BufReader, Write},
    net::{SocketAddr, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use nestlock::{Credentials, LockClient};
use nestlock_embedded::SpawnedServer;
use tokio::task::JoinSet;

const VALID: Duration = Duration::from_secs(1);
const LOAD: Duration = Duration::from_secs(5);

/// Stands for the token service of a cloud: each token is a user, which it deletes after a second.
/// The server then closes the connections that are still logged in with it.
struct TokenService {
    server: SocketAddr,
    issued: AtomicU32,
}

impl TokenService {
    fn token(&self) -> io::Result<Credentials> {
        let user = format!("token{}", self.issued.fetch_add(1, SeqCst) + 1);
        admin(
            self.server,
            &format!("ACL SETUSER {user} on >pw ~* &* +@all"),
        )?;
        let (server, expired) = (self.server, format!("ACL DELUSER {user}"));
        thread::spawn(move || {
            thread::sleep(VALID);
            // the server may be gone by now
            let _ = admin(server, &expired);
        });
        Ok(Credentials::new(user, "pw").valid_for(VALID))
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let server = SpawnedServer::start()?;
    let tokens = Arc::new(TokenService {
        server: server.addr(),
        issued: AtomicU32::new(0),
    });
    let service = Arc::clone(&tokens);
    let client = LockClient::builder()
        .watchdog_timeout(Duration::from_secs(3))
        .credentials(move || {
            let service = Arc::clone(&service);
            async move { service.token() }
        })
        .connect(format!("redis://{}", server.addr()))
        .await?;
    let held = client.mutex("held")?.lock().await?;

    let (began, mut tasks) = (Instant::now(), JoinSet::new());
    for n in 0..8 {
        let lock = client.mutex(format!("order:{}", n % 4))?;
        tasks.spawn(async move {
            let (mut done, mut failed) = (0, 0);
            while began.elapsed() < LOAD {
                let called = async { lock.lock().await?.unlock().await };
                match called.await {
                    Ok(()) => done += 1,
                    Err(error) => {
                        println!("{error}");
                        failed += 1;
                    }
                }
            }
            (done, failed)
        });
    }
    let (mut done, mut failed) = (0, 0);
    while let Some(of_one) = tasks.join_next().await {
        let (more_done, more_failed) = of_one?;
        (done, failed) = (done + more_done, failed + more_failed);
    }
    println!(
        "{} tokens of {VALID:?} in {LOAD:?} for two connections; {done} locks were acquired and released, {failed} calls \
         failed",
        tokens.issued.load(SeqCst)
    );
    held.unlock().await?;
    println!("the lock that was held all the time was never lost");
    client.shutdown().await?;
    Ok(())
}

/// Sends one command, as the administrator of the server.
fn admin(server: SocketAddr, command: &str) -> io::Result<()> {
    let mut stream = BufReader::new(TcpStream::connect(server)?);
    write!(stream.get_mut(), "{command}\r\n")?;
    let mut answer = String::new();
    stream.read_line(&mut answer)?;
    if answer.starts_with('-') {
        return Err(io::Error::other(answer));
    }
    Ok(())
}
