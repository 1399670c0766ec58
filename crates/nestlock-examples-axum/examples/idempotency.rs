//! Payments with an `Idempotency-Key`: a retry gets the first response, and pays nothing.
//!
//! Run: `cargo run -p nestlock-examples-axum --example idempotency`  (uses an embedded server; it
//! calls itself, and ends)
#![allow(clippy::print_stdout)]

use std::{
    error::Error,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes, to_bytes},
    extract::{Request, State},
    http::{HeaderName, HeaderValue, StatusCode, request::Parts},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::post,
};
use nestlock::LockClient;
use nestlock_embedded::EmbeddedServer;
use nestlock_recipes::{
    cached::{CacheError, Cached, Json, RedisStore, cached},
    tower::LockLayer,
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tower::ServiceExt;

/// The responses of the last day, by key.
type Responses = Cached<RedisStore, Json<Stored>>;

/// The longest request, in bytes.
const LONGEST_BODY: usize = 64 * 1024;

/// A response, with a digest of the request that it belongs to.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Stored {
    request: Vec<u8>,
    status: u16,
    headers: Vec<(String, Vec<u8>)>,
    body: Vec<u8>,
}

impl Stored {
    async fn of(request: Vec<u8>, response: Response) -> Result<Self, axum::Error> {
        let (parts, body) = response.into_parts();
        let headers = parts.headers.iter();
        Ok(Self {
            request,
            status: parts.status.as_u16(),
            headers: headers
                .map(|(name, value)| (name.to_string(), value.as_bytes().to_vec()))
                .collect(),
            // without a limit: the handler has done its work, and a retry must find a response
            body: to_bytes(body, usize::MAX).await?.to_vec(),
        })
    }

    fn into_response(self) -> Result<Response, Box<dyn Error>> {
        let mut response = Response::new(Body::from(self.body));
        *response.status_mut() = StatusCode::from_u16(self.status)?;
        for (name, value) in self.headers {
            let (name, value) = (
                HeaderName::try_from(name)?,
                HeaderValue::from_bytes(&value)?,
            );
            response.headers_mut().append(name, value);
        }
        Ok(response)
    }
}

/// Returns the name under which a request with a key is handled. A key is its user's own: without
/// the user's name, one user would get the response of another.
fn name(request: &Parts) -> Option<String> {
    let text = |header| request.headers.get(header)?.to_str().ok();
    // a real service has its user from a session
    let (user, key) = (text("x-user")?, text("idempotency-key")?);
    (key.len() <= 255).then(|| format!("idempotent:{}:{user}:{key}", user.len()))
}

/// Handles a request once for each key, and stores its response.
async fn once_per_key(
    State(responses): State<Responses>,
    request: Request,
    next: Next,
) -> Response {
    let (parts, body) = request.into_parts();
    let Some(name) = name(&parts) else {
        return (
            StatusCode::BAD_REQUEST,
            "Idempotency-Key is missing or too long",
        )
            .into_response();
    };
    let Ok(body) = to_bytes(body, LONGEST_BODY).await else {
        return StatusCode::PAYLOAD_TOO_LARGE.into_response();
    };
    let digest = digest(&parts, &body);
    let handled = {
        let digest = digest.clone();
        // it runs in its own task: it goes on if the client hangs up
        async move {
            Stored::of(
                digest,
                next.run(Request::from_parts(parts, body.into())).await,
            )
            .await
        }
    };
    match responses.try_get_with(&name, handled).await {
        Ok(stored) if stored.request != digest => (
            StatusCode::UNPROCESSABLE_ENTITY,
            "this key was used for another request",
        )
            .into_response(),
        Ok(stored) => stored
            .into_response()
            .unwrap_or_else(|_| StatusCode::INTERNAL_SERVER_ERROR.into_response()),
        Err(CacheError::Busy(_)) => StatusCode::CONFLICT.into_response(),
        Err(error) => (StatusCode::SERVICE_UNAVAILABLE, error.to_string()).into_response(),
    }
}

fn digest(parts: &Parts, body: &Bytes) -> Vec<u8> {
    let head = format!("{} {}\n", parts.method, parts.uri);
    Sha256::new()
        .chain_update(head)
        .chain_update(body)
        .finalize()
        .to_vec()
}

async fn pay(State(payments): State<Arc<AtomicU32>>, body: String) -> (StatusCode, String) {
    tokio::time::sleep(Duration::from_millis(300)).await;
    let number = payments.fetch_add(1, Ordering::SeqCst) + 1;
    (StatusCode::CREATED, format!("payment {number}: {body}"))
}

async fn app(url: &str, payments: &Arc<AtomicU32>) -> Result<(Router, LockClient), Box<dyn Error>> {
    let client = LockClient::connect(url).await?;
    let responses = cached(&client, RedisStore::connect(url).await?)
        .codec(Json::<Stored>::new())
        .ttl(Duration::from_secs(24 * 3600))
        // Redis may be away for a while, and the handler goes on
        .lease(Duration::from_secs(30))
        // no early refresh: it would pay again
        .beta(0.0);
    // while one request is handled, another one with its key gets 409
    let one_at_a_time = LockLayer::new(client.clone(), |request| {
        Some(format!("handle:{}", name(request)?))
    })
    .finish();
    let router = Router::new()
        .route("/payments", post(pay))
        .with_state(Arc::clone(payments))
        .layer(middleware::from_fn_with_state(responses, once_per_key))
        .layer(one_at_a_time);
    Ok((router, client))
}

/// Returns the status and the body of a response.
async fn ask(app: &Router, key: &str, body: &str) -> Result<(u16, String), Box<dyn Error>> {
    let request = Request::post("/payments")
        .header("x-user", "ada")
        .header("idempotency-key", key)
        .body(Body::from(body.to_owned()))?;
    let response = app.clone().oneshot(request).await?;
    let status = response.status().as_u16();
    let text = to_bytes(response.into_body(), usize::MAX).await?;
    let text = String::from_utf8(text.into())?;
    println!("key {key}, {body:?}: {status} {text}");
    Ok((status, text))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let server = EmbeddedServer::start()?;
    let payments = Arc::new(AtomicU32::new(0));
    // two routers stand for two replicas
    let ((one, client), (other, _)) = (
        app(&server.url(), &payments).await?,
        app(&server.url(), &payments).await?,
    );

    let (first, in_flight) = tokio::join!(ask(&one, "k1", "30 to Bob"), async {
        let lock = client.reentrant_lock("handle:idempotent:3:ada:k1")?;
        while !lock.is_locked().await? && payments.load(Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
        ask(&other, "k1", "30 to Bob").await
    });
    let first = first?;
    assert_eq!(first, (201, "payment 1: 30 to Bob".into()));
    assert_eq!(in_flight?.0, 409);

    // the same response, from the other replica
    assert_eq!(ask(&other, "k1", "30 to Bob").await?, first);
    assert_eq!(ask(&other, "k1", "31 to Bob").await?.0, 422);
    assert_eq!(ask(&one, "k2", "31 to Bob").await?.0, 201);
    assert_eq!(ask(&one, &"k".repeat(256), "1 to Bob").await?.0, 400);

    // a client that hangs up: its payment is made, and its retry gets the response
    let gone = tokio::time::timeout(Duration::from_millis(50), ask(&one, "k3", "5 to Eve"));
    assert!(gone.await.is_err());
    let retried = loop {
        match ask(&other, "k3", "5 to Eve").await? {
            (409, _) => tokio::time::sleep(Duration::from_millis(50)).await,
            response => break response,
        }
    };
    assert_eq!(retried, (201, "payment 3: 5 to Eve".into()));
    assert_eq!(payments.load(Ordering::SeqCst), 3);
    Ok(())
}
