//! Tests the layer of `nestlock-recipes` in a real HTTP server, with raw requests.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use axum::{
    Extension, Router,
    body::Body,
    http::{Request, StatusCode, header},
    response::{IntoResponse, Response},
    routing::any,
};
use hyper_util::rt::TokioIo;
use nestlock::LockClient;
use nestlock_embedded::EmbeddedServer;
use nestlock_recipes::tower::{HeldLock, LockLayer};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::mpsc,
};

/// An application that handles one request at a time for each path.
struct App {
    address: std::net::SocketAddr,
    client: LockClient,
    _server: EmbeddedServer,
}

impl App {
    async fn serve(router: Router, layer: impl FnOnce(LockLayer) -> LockLayer) -> Self {
        let server = EmbeddedServer::start().unwrap();
        let client = LockClient::connect(server.url()).await.unwrap();
        let by_path = LockLayer::new(client.clone(), |request| {
            Some(request.uri.path().to_owned())
        });
        let router = router.layer(layer(by_path));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self {
            address,
            client,
            _server: server,
        }
    }

    async fn send(&self, text: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(text.as_bytes()).await.unwrap();
        stream
    }

    async fn is_held(&self, path: &str) -> bool {
        self.client
            .reentrant_lock(path)
            .unwrap()
            .is_locked()
            .await
            .unwrap()
    }

    async fn is_free_soon(&self, path: &str) {
        let free = async {
            while self.is_held(path).await {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(5), free)
            .await
            .expect("it is released");
    }
}

/// Returns all bytes until the connection ends.
async fn read_all(mut stream: TcpStream) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    text
}

async fn read_until(stream: &mut TcpStream, end: &str) -> String {
    let mut text = Vec::new();
    while !text.ends_with(end.as_bytes()) {
        text.push(stream.read_u8().await.unwrap());
    }
    String::from_utf8(text).unwrap()
}

const CLOSE: &str = "Host: a\r\nConnection: close\r\n\r\n";

/// A response without a body releases the lock, and is the same as it would be without the layer.
#[tokio::test]
async fn a_response_without_a_body_releases_and_stays_unchanged() {
    let router = || {
        Router::new()
            .route("/text", any(|| async { "0123456789" }))
            .route("/empty", any(|| async { StatusCode::NO_CONTENT }))
            .route("/nothing", any(|| async { "" }))
    };
    let locked = App::serve(router(), LockLayer::until_body_end).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let plain = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router()).await });
    for (method, path) in [
        ("HEAD", "/text"),
        ("GET", "/text"),
        ("GET", "/empty"),
        ("GET", "/nothing"),
        ("HEAD", "/nothing"),
    ] {
        let request = format!("{method} {path} HTTP/1.1\r\n{CLOSE}");
        let answer = read_all(locked.send(&request).await).await;
        let mut bare = TcpStream::connect(plain).await.unwrap();
        bare.write_all(request.as_bytes()).await.unwrap();
        let without_date = |text: &str| {
            text.split("\r\n")
                .filter(|line| !line.starts_with("date:"))
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            without_date(&answer),
            without_date(&read_all(bare).await),
            "{method} {path}"
        );
        locked.is_free_soon(path).await;
    }
}

#[tokio::test]
async fn requests_of_one_connection_follow_each_other() {
    for until_body_end in [false, true] {
        let router = Router::new().route("/", any(|| async { "done" }));
        let app = App::serve(router, |layer| {
            if until_body_end {
                layer.until_body_end()
            } else {
                layer
            }
        })
        .await;
        // both in one write: the server reads the second one after it has responded to the first
        let mut stream = app
            .send(&format!(
                "POST / HTTP/1.1\r\nHost: a\r\n\r\nPOST / HTTP/1.1\r\n{CLOSE}"
            ))
            .await;
        let first = read_until(&mut stream, "done").await;
        let second = read_all(stream).await;
        for answer in [first, second] {
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        }
        app.is_free_soon("/").await;
    }
}

#[tokio::test]
async fn a_client_that_goes_away_in_the_middle_of_a_body_releases() {
    let (frames, queue) = mpsc::unbounded_channel::<&'static str>();
    let queue = std::sync::Arc::new(std::sync::Mutex::new(Some(queue)));
    let router = Router::new().route(
        "/",
        any(move || {
            let mut queue = queue.lock().unwrap().take().unwrap();
            async move {
                let next = futures_util::stream::poll_fn(move |cx| {
                    queue
                        .poll_recv(cx)
                        .map(|frame| frame.map(Ok::<_, std::io::Error>))
                });
                Body::from_stream(next)
            }
        }),
    );
    let app = App::serve(router, LockLayer::until_body_end).await;
    let mut stream = app.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    frames.send("begun").unwrap();
    read_until(&mut stream, "begun").await;
    assert!(app.is_held("/").await);
    drop(stream);
    app.is_free_soon("/").await;
    assert!(
        frames.send("more").is_err(),
        "the body is still being produced"
    );
}

#[tokio::test]
async fn a_handler_that_panics_releases() {
    async fn panics() -> &'static str {
        panic!("of the handler's")
    }
    let router = Router::new().route("/", any(panics));
    for finish in [false, true] {
        let app = App::serve(
            router.clone(),
            |layer| if finish { layer.finish() } else { layer },
        )
        .await;
        assert_eq!(
            read_all(app.send(&format!("GET / HTTP/1.1\r\n{CLOSE}")).await).await,
            ""
        );
        app.is_free_soon("/").await;
    }
}

/// An upgraded connection outlives its response, and the lock is held while the task of that
/// connection has a clone of it.
#[tokio::test]
async fn an_upgraded_connection_holds_while_its_task_has_the_lock() {
    async fn upgrade(Extension(lock): Extension<HeldLock>, request: Request<Body>) -> Response {
        tokio::spawn(async move {
            let mut speaks = TokioIo::new(hyper::upgrade::on(request).await.unwrap());
            let word = speaks.read_u8().await;
            drop(lock);
            if let Ok(word) = word {
                speaks.write_u8(word).await.unwrap();
            }
        });
        let upgrades = [(header::CONNECTION, "upgrade"), (header::UPGRADE, "echo")];
        (StatusCode::SWITCHING_PROTOCOLS, upgrades).into_response()
    }
    for until_body_end in [false, true] {
        let router = Router::new().route("/", any(upgrade));
        let app = App::serve(router, |layer| {
            if until_body_end {
                layer.until_body_end()
            } else {
                layer
            }
        })
        .await;
        let ask = "GET / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\n";
        let mut speaks = app.send(ask).await;
        assert!(
            read_until(&mut speaks, "\r\n\r\n")
                .await
                .starts_with("HTTP/1.1 101")
        );
        assert!(app.is_held("/").await);
        let second = read_all(app.send(&format!("GET / HTTP/1.1\r\n{CLOSE}")).await).await;
        assert!(second.starts_with("HTTP/1.1 409"), "{second}");
        speaks.write_u8(b'x').await.unwrap();
        assert_eq!(speaks.read_u8().await.unwrap(), b'x');
        app.is_free_soon("/").await;
        // a client that goes away without sending a byte
        let mut silent = app.send(ask).await;
        read_until(&mut silent, "\r\n\r\n").await;
        drop(silent);
        app.is_free_soon("/").await;
    }
}
