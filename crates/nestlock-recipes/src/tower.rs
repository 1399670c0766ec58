#![doc = include_str!("tower.md")]

use std::{
    error, fmt,
    future::Future,
    mem,
    ops::Deref,
    panic,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use futures_util::future::BoxFuture;
use http::{HeaderValue, Request, Response, StatusCode, header::RETRY_AFTER, request::Parts};
use http_body::{Body, Frame, SizeHint};
use nestlock::{AcquireOptions, Error, Lock, LockClient, LockGuard, OwnerId, Permits, Result};
use tokio::sync::oneshot;
use tower_layer::Layer;
use tower_service::Service;
use tracing::Instrument;

use crate::locked::{LockedError, expansion};

type BodyError = Box<dyn error::Error + Send + Sync>;
type LockOf = dyn Fn(&Parts) -> Option<Result<Lock>> + Send + Sync;

/// A tower layer that handles each request under a lock. See the [module](self).
///
/// ```
/// # use nestlock::LockClient;
/// # use nestlock_recipes::tower::LockLayer;
/// # fn example(client: LockClient) -> LockLayer {
/// use std::time::Duration;
///
/// LockLayer::new(client, |request| Some(format!("request:{}", request.uri.path())))
///     .wait(Duration::from_secs(2))
///     .until_body_end()
/// # }
/// ```
#[derive(Clone)]
#[must_use]
pub struct LockLayer {
    lock: Arc<LockOf>,
    status: Arc<dyn Fn(&LockedError) -> StatusCode + Send + Sync>,
    wait: Duration,
    options: AcquireOptions,
    until_body_end: bool,
    finish: bool,
}

impl LockLayer {
    /// Creates a layer that handles each request under the reentrant lock with the name that `name`
    /// returns, or without a lock if it returns `None`.
    ///
    /// If the name contains text from the client of the service, that client chooses the lock: put
    /// a prefix of your own before it.
    pub fn new(
        client: LockClient,
        name: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        Self::of(move |request| Some(client.reentrant_lock(name(request)?)))
    }

    /// Creates a layer that handles each request under the lock that `lock` returns, of any kind,
    /// or without a lock if it returns `None`.
    ///
    /// ```
    /// # use nestlock::LockClient;
    /// # use nestlock_recipes::tower::LockLayer;
    /// # fn example(client: LockClient) -> LockLayer {
    /// // many readers, few writers
    /// LockLayer::of(move |request| {
    ///     let lock = client.read_write_lock(format!("stock:{}", request.uri.path()));
    ///     let is_safe = request.method.is_safe();
    ///     Some(lock.map(|lock| if is_safe { lock.read_lock() } else { lock.write_lock() }))
    /// })
    /// # }
    /// ```
    pub fn of(lock: impl Fn(&Parts) -> Option<Result<Lock>> + Send + Sync + 'static) -> Self {
        Self {
            lock: Arc::new(lock),
            status: Arc::new(status),
            wait: Duration::ZERO,
            options: AcquireOptions::new(),
            until_body_end: false,
            finish: false,
        }
    }

    /// Creates a layer that handles as many requests at the same time as there are permits, over
    /// all replicas of the service. If none is available, the response is 503 with `Retry-After: 1`.
    ///
    /// ```
    /// # use nestlock::LockClient;
    /// # use nestlock_recipes::tower::LockLayer;
    /// # fn example(client: LockClient) -> nestlock::Result<LockLayer> {
    /// use std::time::Duration;
    ///
    /// let permits = client.permits("reports", 10)?;
    /// Ok(LockLayer::at_most(permits).wait(Duration::from_secs(2)))
    /// # }
    /// ```
    pub fn at_most(permits: Permits) -> Self {
        Self::of(move |_| Some(permits.many(1))).statuses(|error| {
            if error.is_busy() {
                StatusCode::SERVICE_UNAVAILABLE
            } else {
                status(error)
            }
        })
    }

    /// Sets how long a request waits for a lock that another request holds. Default zero: it tries
    /// once. Each waiting request takes memory of this process; limit the number of requests
    /// outside the layer.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// Sets how to hold the lock, such as a lease or a TTL. Default: renewed until it is released.
    pub fn options(mut self, options: AcquireOptions) -> Self {
        self.options = options;
        self
    }

    /// Holds the lock until the end of the response's body, rather than until the response. If the
    /// lock is lost before that, the body ends with an error, which is a [`LockedError`].
    pub fn until_body_end(mut self) -> Self {
        self.until_body_end = true;
        self
    }

    /// Handles each request in its own tokio task, which runs to its end even if the client goes
    /// away: for work that must not stop in the middle. If the client goes away while its request
    /// waits for the lock, the wait ends, and the request is not handled.
    ///
    /// This needs the tokio runtime. The task is in the current `tracing` span; other task-local
    /// values are missing.
    pub fn finish(mut self) -> Self {
        self.finish = true;
        self
    }

    /// Sets the status for each error, instead of the [table](self#responses).
    pub fn statuses(
        mut self,
        status: impl Fn(&LockedError) -> StatusCode + Send + Sync + 'static,
    ) -> Self {
        self.status = Arc::new(status);
        self
    }

    fn refuse<B: Body>(&self, error: &LockedError) -> Response<LockBody<B>> {
        let mut response = Response::new(LockBody {
            body: None,
            hold: None,
        });
        *response.status_mut() = (self.status)(error);
        if error.is_busy() {
            response
                .headers_mut()
                .insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }

    /// Handles a request under `lock`, unless the caller goes away before it is acquired. The outer
    /// error is that of the lock.
    async fn handle<B: Body, E, F: Future<Output = Result<Response<B>, E>>>(
        self,
        lock: Result<Lock>,
        mut parts: Parts,
        call: impl FnOnce(Parts) -> F,
        gone: impl Future<Output = ()>,
    ) -> Result<Result<Response<LockBody<B>>, E>, LockedError> {
        let guard = Arc::new(tokio::select! {
            biased;
            // the caller is gone, so any error will do
            () = gone => return Err(LockedError::Lock(Error::Closed)),
            acquired = expansion::acquire(lock, Some(self.wait), self.options) => acquired?,
        });
        parts.extensions.insert(HeldLock(Arc::clone(&guard)));
        let handled = guard
            .run_until_lost(call(parts))
            .await
            .map_err(LockedError::Lost)?;
        let response = match handled {
            Ok(response) => response,
            Err(error) => {
                // the error of the handler takes precedence over that of the release
                let _ = expansion::unlock(Arc::into_inner(guard)).await;
                return Ok(Err(error));
            }
        };
        let hold = if self.until_body_end && !response.body().is_end_stream() {
            let watched = Arc::clone(&guard);
            Some(Hold {
                lost: Some(Box::pin(async move { watched.lost().await })),
                release: Box::pin(async move { expansion::unlock(Arc::into_inner(guard)).await }),
                last: None,
            })
        } else {
            expansion::unlock(Arc::into_inner(guard)).await?;
            None
        };
        Ok(Ok(response.map(|body| LockBody {
            body: Some(body),
            hold,
        })))
    }
}

/// Returns the default status of an error: the table in the module's documentation.
fn status(error: &LockedError) -> StatusCode {
    match error {
        _ if error.is_busy() => StatusCode::CONFLICT,
        LockedError::Lost(_) | LockedError::Lock(Error::Closed) => StatusCode::SERVICE_UNAVAILABLE,
        LockedError::Lock(Error::InvalidName { .. }) => StatusCode::BAD_REQUEST,
        LockedError::Lock(error) if error.is_transient() => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

impl<S> Layer<S> for LockLayer {
    type Service = LockService<S>;

    fn layer(&self, inner: S) -> LockService<S> {
        LockService {
            inner,
            layer: self.clone(),
        }
    }
}

impl fmt::Debug for LockLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockLayer")
            .field("wait", &self.wait)
            .field("options", &self.options)
            .field("until_body_end", &self.until_body_end)
            .field("finish", &self.finish)
            .finish_non_exhaustive()
    }
}

/// A service under a [`LockLayer`].
///
/// For an example, see [`tower`].
///
/// [`tower`]: self
#[derive(Debug, Clone)]
pub struct LockService<S> {
    inner: S,
    layer: LockLayer,
}

impl<S, B, R> Service<Request<B>> for LockService<S>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: Send + 'static,
    R: Body + Send + 'static,
    R::Data: Send,
{
    type Response = Response<LockBody<R>>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Self::Response, S::Error>>;

    /// Polls the inner service. There is no request to lock for yet.
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // a clone of a ready service need not be ready: the clone stays, and the ready one is
        // called
        let clone = self.inner.clone();
        let mut service = mem::replace(&mut self.inner, clone);
        let layer = self.layer.clone();
        let (parts, body) = request.into_parts();
        let call = move |parts| service.call(Request::from_parts(parts, body));
        let Some(lock) = (layer.lock)(&parts) else {
            return Box::pin(OwnerId::scope(async move {
                Ok(call(parts).await?.map(|body| LockBody {
                    body: Some(body),
                    hold: None,
                }))
            }));
        };
        Box::pin(async move {
            let (refusing, finish) = (layer.clone(), layer.finish);
            let (mut task_end, caller_end) = oneshot::channel::<()>();
            let handled =
                OwnerId::scope(
                    async move { layer.handle(lock, parts, call, task_end.closed()).await },
                );
            let outcome = if finish {
                tokio::spawn(handled.in_current_span())
                    .await
                    .unwrap_or_else(|error| match error.try_into_panic() {
                        Ok(panic) => panic::resume_unwind(panic),
                        // the runtime is shutting down
                        Err(_) => Err(LockedError::Lock(Error::Closed)),
                    })
            } else {
                handled.await
            };
            drop(caller_end);
            outcome.unwrap_or_else(|error| Ok(refusing.refuse(&error)))
        })
    }
}

/// The lock under which a request is handled, in the extensions of the request. The lock is held
/// while a clone of this is alive.
///
/// ```
/// # use std::convert::Infallible;
/// # use http::{Request, Response};
/// use nestlock_recipes::tower::HeldLock;
///
/// async fn pay(request: Request<String>) -> Result<Response<String>, Infallible> {
///     let held = request.extensions().get::<HeldLock>();
///     Ok(Response::new(held.map_or_else(String::new, |held| held.name().to_owned())))
/// }
/// ```
#[derive(Debug, Clone)]
pub struct HeldLock(Arc<LockGuard>);

impl Deref for HeldLock {
    type Target = LockGuard;

    fn deref(&self) -> &LockGuard {
        &self.0
    }
}

pin_project_lite::pin_project! {
    /// The body of a response, which may hold the lock: see [`LockLayer::until_body_end`].
    ///
    /// # Cancel safety
    ///
    /// If dropped before its end, it releases the lock in the background.
    ///
    /// For an example, see [`LockLayer`].
    pub struct LockBody<B: Body> {
        // `None`: an empty body
        #[pin]
        body: Option<B>,
        // `None`: the lock is free
        hold: Option<Hold<B::Data>>,
    }
}

struct Hold<D> {
    /// Holds a clone of the guard, so it must be dropped before the lock can be released.
    lost: Option<BoxFuture<'static, Error>>,
    release: BoxFuture<'static, Result<(), LockedError>>,
    /// The last frame or error of the body, which is passed on when the lock is free.
    last: Option<Result<Frame<D>, BodyError>>,
}

impl<B: Body> Body for LockBody<B>
where
    B::Error: Into<BodyError>,
{
    type Data = B::Data;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, BodyError>>> {
        let mut this = self.project();
        let Some(hold) = this.hold else {
            let Some(body) = this.body.as_pin_mut() else {
                return Poll::Ready(None);
            };
            return body.poll_frame(cx).map_err(Into::into);
        };
        if let (Some(lost), Some(mut body)) = (&mut hold.lost, this.body.as_mut().as_pin_mut()) {
            if let Poll::Ready(loss) = lost.as_mut().poll(cx) {
                *this.hold = None;
                this.body.set(None);
                return Poll::Ready(Some(Err(LockedError::Lost(loss).into())));
            }
            let frame = ready!(body.as_mut().poll_frame(cx)).map(|frame| frame.map_err(Into::into));
            if matches!(frame, Some(Ok(_))) && !body.is_end_stream() {
                return Poll::Ready(frame);
            }
            (hold.lost, hold.last) = (None, frame);
            // the body may own the request, and with it a clone of the guard
            this.body.set(None);
        }
        let released = ready!(hold.release.as_mut().poll(cx));
        let last = released.map_or_else(|loss| Some(Err(loss.into())), |()| hold.last.take());
        *this.hold = None;
        Poll::Ready(last)
    }

    fn is_end_stream(&self) -> bool {
        self.hold.is_none() && self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        match (&self.body, &self.hold) {
            (Some(body), _) => body.size_hint(),
            // the body is gone, but its last frame is still to come
            (None, Some(_)) => SizeHint::default(),
            (None, None) => SizeHint::with_exact(0),
        }
    }
}

impl<B: Body> fmt::Debug for LockBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockBody")
            .field("holds_the_lock", &self.hold.is_some())
            .finish_non_exhaustive()
    }
}
