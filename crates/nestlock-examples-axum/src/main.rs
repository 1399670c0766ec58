//! A handler that pays an invoice once: while another request pays it, the response is 409, and
//! while the lock server is unreachable, it is 503.
//!
//! Run: `cargo run -p nestlock-examples-axum`  (uses an embedded server; it calls itself, and ends)
#![allow(clippy::print_stdout)]

use std::{error::Error, net::SocketAddr, time::Duration};

use axum::{
    Router,
    extract::{Path, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::post,
};
use nestlock::{LockClient, LockGuard};
use nestlock_embedded::EmbeddedServer;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

/// An error of a lock, as a response.
struct Failure(nestlock::Error);

impl From<nestlock::Error> for Failure {
    fn from(error: nestlock::Error) -> Self {
        Self(error)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let Self(error) = self;
        let status = match () {
            () if error.is_conflict() => StatusCode::CONFLICT,
            () if error.is_transient() => StatusCode::SERVICE_UNAVAILABLE,
            () => StatusCode::INTERNAL_SERVER_ERROR,
        };
        (status, error.to_string()).into_response()
    }
}

async fn pay(
    State(client): State<LockClient>,
    Path(invoice): Path<u32>,
) -> Result<Response, Failure> {
    let Some(guard) = client
        .mutex(format!("invoice:{invoice}"))?
        .try_lock()
        .await?
    else {
        return Ok((StatusCode::CONFLICT, "another request is paying it").into_response());
    };
    // if the client hangs up, this handler is dropped, but not the payment
    let payment = tokio::spawn(transfer(guard));
    payment.await.expect("a payment does not panic")?;
    Ok("paid".into_response())
}

async fn transfer(guard: LockGuard) -> nestlock::Result<()> {
    guard
        .run_until_lost(tokio::time::sleep(Duration::from_millis(300)))
        .await?;
    guard.unlock().await
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let server = EmbeddedServer::start()?;
    let client = LockClient::connect(server.url()).await?;
    let app = Router::new()
        .route("/invoices/{invoice}/pay", post(pay))
        .with_state(client.clone());
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let addr = listener.local_addr()?;
    tokio::spawn(async move { axum::serve(listener, app).await });

    let first = tokio::spawn(ask(addr, 7));
    while !client.mutex("invoice:7")?.is_locked().await? {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let (second, other) = (ask(addr, 7).await?, ask(addr, 8).await?);
    let first = first.await?.map_err(|error| error.to_string())?;
    println!(
        "first: {first}; second, at the same time: {second}; another invoice: {other}; afterwards: {}",
        ask(addr, 7).await?
    );
    assert_eq!((first, second, other), (200, 409, 200));

    drop(server);
    let unreachable = ask(addr, 7).await?;
    println!("without a lock server: {unreachable}");
    assert_eq!(unreachable, 503);
    Ok(())
}

/// Requests a payment. Returns the status of the response.
async fn ask(addr: SocketAddr, invoice: u32) -> Result<u16, std::io::Error> {
    let mut stream = TcpStream::connect(addr).await?;
    let request = format!(
        "POST /invoices/{invoice}/pay HTTP/1.1\r\nHost: {addr}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    let status = answer
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok());
    status.ok_or_else(|| std::io::Error::other(answer))
}
