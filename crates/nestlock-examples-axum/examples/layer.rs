//! A router that handles one `POST` at a time for each path, by a layer: the handlers contain no
//! lock code.
//!
//! Run: `cargo run -p nestlock-examples-axum --example layer`  (uses an embedded server; it calls
//! itself, and ends)
#![allow(clippy::print_stdout)]

use std::{error::Error, time::Duration};

use axum::{
    Extension, Router,
    body::Body,
    extract::Path,
    http::{Method, Request, StatusCode, header::RETRY_AFTER},
    routing::get,
};
use nestlock::LockClient;
use nestlock_embedded::EmbeddedServer;
use nestlock_recipes::tower::{HeldLock, LockLayer};
use tower::ServiceExt;

async fn show(Path(invoice): Path<u32>) -> String {
    format!("invoice {invoice}")
}

async fn pay(Path(invoice): Path<u32>, Extension(lock): Extension<HeldLock>) -> String {
    tokio::time::sleep(Duration::from_millis(300)).await;
    format!("invoice {invoice} was paid under the lock {}", lock.name())
}

/// Returns the status and the body of a response, and whether it has a `Retry-After` header.
async fn ask(
    app: &Router,
    method: Method,
    path: &str,
) -> Result<(StatusCode, String, bool), Box<dyn Error>> {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .body(Body::empty())?;
    let response = app.clone().oneshot(request).await?;
    let (status, again) = (
        response.status(),
        response.headers().contains_key(RETRY_AFTER),
    );
    let body = axum::body::to_bytes(response.into_body(), usize::MAX).await?;
    println!("{path}: {status} {body:?}");
    Ok((status, String::from_utf8(body.into())?, again))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let server = EmbeddedServer::start()?;
    let client = LockClient::connect(server.url()).await?;
    // safe methods pass without a lock; a payment does not stop if the client hangs up
    let one_at_a_time = LockLayer::new(client.clone(), |request| {
        (!request.method.is_safe()).then(|| format!("request:{}", request.uri.path()))
    })
    .finish();
    let app = Router::new()
        .route("/invoices/{invoice}", get(show).post(pay))
        .layer(one_at_a_time);

    let (first, meanwhile) = tokio::join!(ask(&app, Method::POST, "/invoices/7"), async {
        while !client
            .reentrant_lock("request:/invoices/7")?
            .is_locked()
            .await?
        {
            tokio::task::yield_now().await;
        }
        let second = ask(&app, Method::POST, "/invoices/7").await?;
        let reader = ask(&app, Method::GET, "/invoices/7").await?;
        Ok::<_, Box<dyn Error>>((second, reader))
    });
    let (second, reader) = meanwhile?;
    assert_eq!(first?.0, StatusCode::OK);
    assert_eq!((second.0, second.2), (StatusCode::CONFLICT, true));
    assert_eq!(reader.0, StatusCode::OK);

    drop(server);
    assert_eq!(
        ask(&app, Method::POST, "/invoices/7").await?.0,
        StatusCode::SERVICE_UNAVAILABLE
    );
    assert_eq!(
        ask(&app, Method::GET, "/invoices/7").await?.0,
        StatusCode::OK
    );
    Ok(())
}
