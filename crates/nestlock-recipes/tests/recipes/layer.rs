//! Tests what the documentation of the tower layer promises.

use std::{
    convert::Infallible,
    error::Error as _,
    future::{Future, poll_fn, ready},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering::SeqCst},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, StatusCode, header::RETRY_AFTER};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Full, StreamBody};
use nestlock::Error;
use nestlock_recipes::{
    LockedError,
    tower::{HeldLock, LockBody, LockLayer},
};
use tokio::sync::{Notify, mpsc};
use tower::{Layer, Service, ServiceExt, service_fn};

use crate::stage::Stage;

type Text = Full<Bytes>;

impl Stage {
    /// Returns a layer that locks the path, except for `/`.
    fn layer(&self) -> LockLayer {
        LockLayer::new(self.locks.clone(), |request| {
            Some(request.uri.path().to_owned()).filter(|path| path != "/")
        })
    }
}

fn to(path: &str) -> Request<()> {
    Request::builder().uri(path).body(()).unwrap()
}

fn answer() -> Response<Text> {
    Response::new("handled".into())
}

/// A handler that waits until it may end, and counts how often it started and ended.
#[derive(Clone, Default)]
struct Handler {
    begins: Arc<AtomicU32>,
    ends: Arc<AtomicU32>,
    begun: Arc<Notify>,
    may_end: Arc<Notify>,
}

impl Handler {
    async fn handle(self) -> Result<Response<Text>, Infallible> {
        self.begins.fetch_add(1, SeqCst);
        self.begun.notify_one();
        self.may_end.notified().await;
        self.ends.fetch_add(1, SeqCst);
        Ok(answer())
    }

    fn behind(
        &self,
        layer: &LockLayer,
    ) -> impl Service<
        Request<()>,
        Response = Response<LockBody<Text>>,
        Error = Infallible,
        Future: Send,
    > + Clone
    + use<> {
        let handler = self.clone();
        layer.layer(service_fn(move |_| handler.clone().handle()))
    }

    fn counts(&self) -> (u32, u32) {
        (self.begins.load(SeqCst), self.ends.load(SeqCst))
    }
}

fn status<B>(response: &Result<Response<B>, Infallible>) -> (StatusCode, Option<&str>) {
    let response = response.as_ref().unwrap();
    let retry = response
        .headers()
        .get(RETRY_AFTER)
        .map(|value| value.to_str().unwrap());
    (response.status(), retry)
}

const BUSY: (StatusCode, Option<&str>) = (StatusCode::CONFLICT, Some("1"));
const OK: (StatusCode, Option<&str>) = (StatusCode::OK, None);
const AWAY: (StatusCode, Option<&str>) = (StatusCode::SERVICE_UNAVAILABLE, None);

// --- exclusion ---

#[tokio::test]
async fn requests_that_one_task_polls_exclude_each_other() {
    let (stage, handler) = (Stage::new().await, Handler::default());
    let service = handler.behind(&stage.layer());
    let meanwhile = async {
        handler.begun.notified().await;
        let busy = service.clone().oneshot(to("/a")).await;
        handler.may_end.notify_one();
        busy
    };
    let (first, busy) = tokio::join!(service.clone().oneshot(to("/a")), meanwhile);
    assert_eq!((status(&first), status(&busy)), (OK, BUSY));
    assert_eq!(
        first
            .unwrap()
            .into_body()
            .collect()
            .await
            .unwrap()
            .to_bytes(),
        "handled"
    );
    assert!(busy.unwrap().into_body().is_end_stream());
    assert_eq!(handler.counts(), (1, 1));
    // another path at the same time
    let (a, b) = tokio::join!(service.clone().oneshot(to("/a")), async {
        handler.begun.notified().await;
        let other = tokio::join!(service.clone().oneshot(to("/b")), async {
            handler.begun.notified().await;
            handler.may_end.notify_waiters();
        });
        other.0
    });
    assert_eq!((status(&a), status(&b)), (OK, OK));
}

#[tokio::test]
async fn at_most_as_many_requests_as_permits_are_handled() {
    const FULL: (StatusCode, Option<&str>) = (StatusCode::SERVICE_UNAVAILABLE, Some("1"));
    let (stage, handler) = (Stage::new().await, Handler::default());
    // two replicas
    let clients = [stage.locks.clone(), stage.other.clone()];
    let [one, other] = clients
        .map(|client| handler.behind(&LockLayer::at_most(client.permits("all", 2).unwrap())));
    let third = async {
        while handler.counts().0 < 2 {
            handler.begun.notified().await;
        }
        let third = one.clone().oneshot(to("/c")).await;
        handler.may_end.notify_waiters();
        third
    };
    let (a, b, third) = tokio::join!(
        one.clone().oneshot(to("/a")),
        other.oneshot(to("/b")),
        third
    );
    assert_eq!((status(&a), status(&b), status(&third)), (OK, OK, FULL));
    assert_eq!(handler.counts(), (2, 2));
    handler.may_end.notify_one();
    assert_eq!(status(&one.oneshot(to("/d")).await), OK);
}

#[tokio::test]
async fn with_a_wait_requests_queue_up_and_are_handled_one_at_a_time() {
    let (stage, handler) = (Stage::new().await, Handler::default());
    let service = handler.behind(&stage.layer().wait(Duration::from_secs(60)));
    let end_each = async {
        for n in 1..=3 {
            handler.begun.notified().await;
            assert_eq!(handler.counts(), (n, n - 1));
            handler.may_end.notify_one();
        }
    };
    let call = || service.clone().oneshot(to("/a"));
    let (a, b, c, ()) = tokio::join!(call(), call(), call(), end_each);
    assert_eq!((status(&a), status(&b), status(&c)), (OK, OK, OK));
}

/// The handler has the same owner as the request, so its own acquire is re-entrant.
#[tokio::test]
async fn the_handler_may_take_its_lock_again_and_knows_it() {
    let stage = Stage::new().await;
    for layer in [
        stage.layer(),
        stage.layer().finish(),
        stage.layer().until_body_end(),
    ] {
        let locks = stage.locks.clone();
        let service = layer.layer(service_fn(move |request: Request<()>| {
            let lock = locks.reentrant_lock("/a").unwrap();
            async move {
                let held = request.extensions().get::<HeldLock>().expect("the lock");
                assert_eq!(held.name(), "/a");
                let again = lock.try_lock().await.unwrap().expect("a re-entry");
                assert_eq!(
                    (again.owner(), lock.hold_count(&held.owner()).await.unwrap()),
                    (held.owner(), 2)
                );
                again.unlock().await.unwrap();
                Ok::<_, Infallible>(answer())
            }
        }));
        assert_eq!(status(&service.oneshot(to("/a")).await), OK);
    }
}

#[tokio::test]
async fn any_kind_of_lock_will_do_and_a_fenced_one_has_a_token() {
    let stage = Stage::new().await;
    let locks = stage.locks.clone();
    let layer = LockLayer::of(move |request| Some(locks.fenced_lock(request.uri.path())));
    let service = layer.layer(service_fn(|request: Request<()>| async move {
        let token = request
            .extensions()
            .get::<HeldLock>()
            .and_then(|held| held.fencing_token())
            .expect("a token");
        Ok::<_, Infallible>(Response::new(Text::from(token.to_string())))
    }));
    let mut last = 0;
    for _ in 0..2 {
        let body = service
            .clone()
            .oneshot(to("/a"))
            .await
            .unwrap()
            .into_body()
            .collect()
            .await
            .unwrap()
            .to_bytes();
        let token: u64 = String::from_utf8(body.into()).unwrap().parse().unwrap();
        assert!(token > last);
        last = token;
    }
}

/// Panics unless `poll_ready` was called before. A clone has to be polled again.
#[derive(Default)]
struct Readied(bool);

impl Clone for Readied {
    fn clone(&self) -> Self {
        Self(false)
    }
}

impl Service<Request<()>> for Readied {
    type Response = Response<Text>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Response<Text>, Infallible>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0 = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _request: Request<()>) -> Self::Future {
        assert!(std::mem::take(&mut self.0), "called without being ready");
        ready(Ok(answer()))
    }
}

#[tokio::test]
async fn the_service_that_is_called_is_the_one_that_was_ready() {
    let stage = Stage::new().await;
    for layer in [stage.layer(), stage.layer().finish()] {
        let mut service = layer.layer(Readied::default());
        for path in ["/", "/a", "/a"] {
            poll_fn(|cx| service.poll_ready(cx)).await.unwrap();
            // readiness takes no lock: a ready service may never be called
            assert!(!stage.is_locked("/a").await);
            assert_eq!(status(&service.call(to(path)).await), OK);
        }
    }
}

// --- responses ---

/// A request without a lock name is handled, and without a server no other request is.
#[tokio::test]
async fn a_request_without_a_name_passes_and_others_need_a_server() {
    let (stage, handler) = (Stage::new().await, Handler::default());
    let named = handler.behind(&LockLayer::new(stage.locks.clone(), |_| Some("{".into())));
    let teapot = handler.behind(&stage.layer().statuses(|error| match error {
        LockedError::Lock(error) if error.is_transient() => StatusCode::IM_A_TEAPOT,
        _ => StatusCode::OK,
    }));
    let service = handler.behind(&stage.layer());
    drop(stage.server);
    handler.may_end.notify_one();
    assert_eq!(status(&service.clone().oneshot(to("/")).await), OK);
    assert_eq!(status(&service.oneshot(to("/a")).await), AWAY);
    assert_eq!(
        status(&named.oneshot(to("/a")).await),
        (StatusCode::BAD_REQUEST, None)
    );
    assert_eq!(
        status(&teapot.oneshot(to("/a")).await),
        (StatusCode::IM_A_TEAPOT, None)
    );
    assert_eq!(handler.counts(), (1, 1));
}

#[tokio::test]
async fn a_loss_drops_the_handler_and_is_reported() {
    let (stage, handler) = (Stage::new().await, Handler::default());
    for layer in [stage.layer(), stage.layer().finish()] {
        let service = handler.behind(&layer);
        let free = async {
            handler.begun.notified().await;
            stage.free("/a").await;
        };
        let (lost, ()) = tokio::join!(service.clone().oneshot(to("/a")), free);
        assert_eq!(status(&lost), AWAY);
    }
    assert_eq!(handler.counts(), (2, 0));
    // before the next renewal: the release finds out
    let free = async {
        handler.begun.notified().await;
        stage.free("/a").await;
        handler.may_end.notify_one();
    };
    let (lost, ()) = tokio::join!(handler.behind(&stage.layer()).oneshot(to("/a")), free);
    assert_eq!(status(&lost), AWAY);
}

#[tokio::test]
async fn the_handlers_own_error_is_passed_on_and_the_lock_is_free() {
    let stage = Stage::new().await;
    let fails = service_fn(|_: Request<()>| ready(Err::<Response<Text>, _>("refused")));
    for layer in [stage.layer(), stage.layer().finish()] {
        assert_eq!(
            layer.layer(fails).oneshot(to("/a")).await.err(),
            Some("refused")
        );
        assert!(!stage.is_locked("/a").await);
    }
}

// --- when it is released ---

#[tokio::test]
async fn it_is_free_at_the_response_unless_a_task_keeps_it() {
    let (stage, may_end) = (Stage::new().await, Arc::new(Notify::new()));
    let keep = Arc::new(AtomicBool::new(false));
    let service = {
        let (keep, may_end) = (Arc::clone(&keep), Arc::clone(&may_end));
        stage.layer().layer(service_fn(move |request: Request<()>| {
            let held = request
                .extensions()
                .get::<HeldLock>()
                .expect("the lock")
                .clone();
            if keep.load(SeqCst) {
                let may_end = Arc::clone(&may_end);
                tokio::spawn(async move {
                    may_end.notified().await;
                    drop(held);
                });
            }
            ready(Ok::<_, Infallible>(answer()))
        }))
    };
    assert_eq!(status(&service.clone().oneshot(to("/a")).await), OK);
    assert!(!stage.is_locked("/a").await);
    keep.store(true, SeqCst);
    assert_eq!(status(&service.clone().oneshot(to("/a")).await), OK);
    assert_eq!(status(&service.clone().oneshot(to("/a")).await), BUSY);
    may_end.notify_one();
    stage
        .other
        .mutex("/a")
        .unwrap()
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
}

type Frames = mpsc::UnboundedSender<Result<Frame<Bytes>, std::io::Error>>;

/// Returns a service whose response body is what the test sends.
fn streaming(
    layer: &LockLayer,
) -> (
    Frames,
    impl Service<
        Request<()>,
        Response = Response<LockBody<impl Body<Data = Bytes, Error = std::io::Error> + use<>>>,
        Error = Infallible,
    > + use<>,
) {
    let (frames, sent) = mpsc::unbounded_channel();
    let sent = Arc::new(std::sync::Mutex::new(Some(sent)));
    let service = layer.layer(service_fn(move |_: Request<()>| {
        let mut sent = sent.lock().unwrap().take().expect("one request");
        let stream = futures_util::stream::poll_fn(move |cx| sent.poll_recv(cx));
        ready(Ok::<_, Infallible>(Response::new(StreamBody::new(stream))))
    }));
    (frames, service)
}

#[tokio::test]
async fn until_the_end_of_the_body_it_is_held() {
    let stage = Stage::new().await;
    let (frames, service) = streaming(&stage.layer().until_body_end());
    let mut body = service.oneshot(to("/a")).await.unwrap().into_body();
    for text in ["one", "two"] {
        frames
            .send(Ok(Frame::data(Bytes::from_static(text.as_bytes()))))
            .unwrap();
        assert_eq!(
            body.frame().await.unwrap().unwrap().into_data().unwrap(),
            text
        );
        assert!(stage.is_locked("/a").await && !body.is_end_stream());
    }
    drop(frames);
    assert!(body.frame().await.is_none());
    assert!(!stage.is_locked("/a").await && body.is_end_stream());
    assert!(body.frame().await.is_none());
}

/// A client that has read the last byte need not read to the end: the lock is free before that byte
/// arrives.
#[tokio::test]
async fn the_last_frame_comes_when_it_is_free() {
    let stage = Stage::new().await;
    let service = stage
        .layer()
        .until_body_end()
        .layer(service_fn(|_: Request<()>| {
            ready(Ok::<_, Infallible>(answer()))
        }));
    let mut body = service.oneshot(to("/a")).await.unwrap().into_body();
    assert_eq!(body.size_hint().exact(), Some(7));
    assert!(stage.is_locked("/a").await);
    assert_eq!(
        body.frame().await.unwrap().unwrap().into_data().unwrap(),
        "handled"
    );
    assert!(!stage.is_locked("/a").await && body.is_end_stream());
    // without a body, the lock is released at the response
    let service = stage
        .layer()
        .until_body_end()
        .layer(service_fn(|_: Request<()>| {
            ready(Ok::<_, Infallible>(Response::new(Text::default())))
        }));
    let response = service.oneshot(to("/a")).await.unwrap();
    assert!(!stage.is_locked("/a").await && response.body().is_end_stream());
}

#[tokio::test]
async fn a_body_that_fails_or_is_dropped_releases() {
    let stage = Stage::new().await;
    let (frames, service) = streaming(&stage.layer().until_body_end());
    let mut body = service.oneshot(to("/a")).await.unwrap().into_body();
    frames.send(Err(std::io::Error::other("torn"))).unwrap();
    assert_eq!(body.frame().await.unwrap().unwrap_err().to_string(), "torn");
    assert!(!stage.is_locked("/a").await && body.frame().await.is_none());

    let (_frames, service) = streaming(&stage.layer().until_body_end());
    let response = service.oneshot(to("/a")).await.unwrap();
    assert!(stage.is_locked("/a").await);
    drop(response);
    stage.locks.idle().await;
    assert!(!stage.is_locked("/a").await);
}

#[tokio::test]
async fn a_loss_ends_the_body_with_an_error() {
    let stage = Stage::new().await;
    let lost = |error: Box<dyn std::error::Error + Send + Sync>| {
        let error = error.downcast::<LockedError>().expect("a LockedError");
        assert!(
            matches!(*error, LockedError::Lost(Error::Lost { .. })) && error.source().is_some()
        );
    };
    let (frames, service) = streaming(&stage.layer().until_body_end());
    let mut body = service.oneshot(to("/a")).await.unwrap().into_body();
    stage.free("/a").await;
    lost(body.frame().await.unwrap().unwrap_err());
    assert!(body.frame().await.is_none() && frames.is_closed());
    // before the next renewal: the release finds out
    let (frames, service) = streaming(&stage.layer().until_body_end());
    let mut body = service.oneshot(to("/a")).await.unwrap().into_body();
    stage.free("/a").await;
    drop(frames);
    lost(body.frame().await.unwrap().unwrap_err());
    assert!(body.frame().await.is_none());
}

// --- clients that go away ---

/// Polls until the handler has started, then drops the call.
async fn go_away<F: Future>(call: F, begun: &Notify) {
    tokio::select! {
        biased;
        _ = call => panic!("it has come to its end"),
        () = begun.notified() => {}
    }
}

#[tokio::test]
async fn a_gone_client_stops_the_handler_unless_it_has_to_finish() {
    let (stage, handler) = (Stage::new().await, Handler::default());
    go_away(
        handler.behind(&stage.layer()).oneshot(to("/a")),
        &handler.begun,
    )
    .await;
    stage.locks.idle().await;
    assert!(!stage.is_locked("/a").await);

    let service = handler.behind(&stage.layer().finish());
    go_away(service.clone().oneshot(to("/a")), &handler.begun).await;
    assert_eq!(status(&service.clone().oneshot(to("/a")).await), BUSY);
    assert_eq!(handler.counts(), (2, 0));
    handler.may_end.notify_one();
    stage
        .other
        .mutex("/a")
        .unwrap()
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    assert_eq!(handler.counts(), (2, 1));
}

#[tokio::test]
async fn a_client_that_goes_away_while_waiting_is_not_handled() {
    let (stage, handler) = (Stage::new().await, Handler::default());
    let guard = stage.other.mutex("/a").unwrap().lock().await.unwrap();
    let service = handler.behind(&stage.layer().finish().wait(Duration::from_secs(3600)));
    let waits = async {
        while stage.locks.stats().channels == 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        _ = service.oneshot(to("/a")) => panic!("it has come to its end"),
        () = waits => {}
    }
    guard.unlock().await.unwrap();
    stage.locks.idle().await;
    assert!(!stage.is_locked("/a").await);
    assert_eq!(handler.counts(), (0, 0));
}

#[tokio::test]
async fn a_panic_of_a_handler_in_its_own_task_is_the_callers() {
    let stage = Stage::new().await;
    let panics = service_fn(|_: Request<()>| async {
        if true {
            panic!("as asked")
        } else {
            Ok::<_, Infallible>(answer())
        }
    });
    let call = tokio::spawn(stage.layer().finish().layer(panics).oneshot(to("/a")));
    assert_eq!(
        call.await.unwrap_err().into_panic().downcast_ref(),
        Some(&"as asked")
    );
    stage.locks.idle().await;
    assert!(!stage.is_locked("/a").await);
}

#[derive(Clone)]
struct Slow;

impl Service<Request<()>> for Slow {
    type Response = Response<Text>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Text>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _request: Request<()>) -> Self::Future {
        Box::pin(async {
            for _ in 0..3 {
                tokio::task::yield_now().await;
            }
            Ok(answer())
        })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_at_any_poll_nothing_stays_held() {
    let stage = Stage::new().await;
    let wait = Duration::from_secs(60);
    for contended in [false, true] {
        for layer in [
            stage.layer().wait(wait),
            stage.layer().wait(wait).until_body_end(),
        ] {
            let call = || async {
                let response = layer.clone().layer(Slow).oneshot(to("/a")).await.unwrap();
                response.into_body().collect().await.unwrap()
            };
            stage.at_every_poll("/a", contended, call).await;
        }
    }
}

/// With `finish`, a request that is dropped at any time is handled to its end, or not at all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_at_any_time_what_has_begun_finishes() {
    let stage = Stage::new().await;
    let [begins, ends] = [(); 2].map(|()| Arc::new(AtomicU32::new(0)));
    let service = {
        let (begins, ends) = (Arc::clone(&begins), Arc::clone(&ends));
        stage
            .layer()
            .finish()
            .layer(service_fn(move |_: Request<()>| {
                let (begins, ends) = (Arc::clone(&begins), Arc::clone(&ends));
                async move {
                    begins.fetch_add(1, SeqCst);
                    tokio::task::yield_now().await;
                    ends.fetch_add(1, SeqCst);
                    Ok::<_, Infallible>(answer())
                }
            }))
    };
    let (lock, mut answers, mut drops, mut turns) = (stage.other.mutex("/a").unwrap(), 0, 0, 0);
    while answers < 4 {
        // later each time, because the duration depends on the machine
        turns += 1 + turns / 8;
        let later = async {
            for _ in 0..turns {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            biased;
            // it may be busy while the previous drop is still being undone
            answered = service.clone().oneshot(to("/a")) => answers += u32::from(status(&answered) == OK),
            () = later => drops += 1,
        }
        // the next holder comes after all handlers that have started
        let next = lock.lock().await.unwrap();
        assert_eq!(
            begins.load(SeqCst),
            ends.load(SeqCst),
            "after {drops} drops"
        );
        next.unlock().await.unwrap();
    }
    assert!(drops > 0 && begins.load(SeqCst) >= answers);
}
