#![doc = include_str!("tower.md")]

use std::{
    error, fmt,
    future::{Future, pending},
    mem,
    ops::Deref,
    panic,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use http::{HeaderValue, Request, Response, StatusCode, header::RETRY_AFTER, request::Parts};
use http_body::{Body, Frame, SizeHint};
use nestlock::{AcquireOptions, Error, Lock, LockClient, LockGuard, OwnerId, Result};
use tokio::sync::oneshot;
use tower_layer::Layer;
use tower_service::Service;
use tracing::Instrument;

use crate::locked::{LockedError, expansion};

type BoxError = Box<dyn error::Error + Send + Sync>;
type LockOf = dyn Fn(&Parts) -> Option<Result<Lock>> + Send + Sync;
type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Handles each request under a lock. See the [module](self).
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
    /// Handles each request under the reentrant lock of the name that `name` makes of it; `None`: without a lock.
    ///
    /// Mind that a name which is made of what the client sent is the client's choice: put a word of your own before it.
    pub fn new(client: LockClient, name: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static) -> Self {
        Self::of(move |request| Some(client.reentrant_lock(name(request)?)))
    }

    /// Handles each request under the lock that `lock` makes of it, of whatever kind; `None`: without a lock.
    ///
    /// ```
    /// # use nestlock::LockClient;
    /// # use nestlock_recipes::tower::LockLayer;
    /// # fn example(client: LockClient) -> LockLayer {
    /// // many look, few change
    /// LockLayer::of(move |request| {
    ///     let lock = client.read_write_lock(format!("stock:{}", request.uri.path()));
    ///     Some(lock.map(|lock| if request.method.is_safe() { lock.read_lock() } else { lock.write_lock() }))
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

    /// How long a request waits for a lock that another one has. Default zero: it tries once. Each waiting request is one
    /// more in the memory of this process; put a limit to them outside.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// How to hold the lock: a lease, a TTL. Default: renewed until it is released.
    pub fn options(mut self, options: AcquireOptions) -> Self {
        self.options = options;
        self
    }

    /// Holds the lock until the end of the response's body, rather than until the response. When the lock is lost meanwhile,
    /// the body ends with an error, which is a [`LockedError`].
    pub fn until_body_end(mut self) -> Self {
        self.until_body_end = true;
        self
    }

    /// Handles each request in a tokio task of its own, which goes on to its end when the client goes away: for work that must
    /// not stop in the middle. Whoever goes away while waiting for the lock waits no more, and is not handled.
    ///
    /// It needs tokio's runtime. The task is in the current `tracing` span; other task-local values are not there.
    pub fn finish(mut self) -> Self {
        self.finish = true;
        self
    }

    /// Which status says what is wrong, in place of the [table](self#what-the-client-of-the-service-hears).
    pub fn statuses(mut self, status: impl Fn(&LockedError) -> StatusCode + Send + Sync + 'static) -> Self {
        self.status = Arc::new(status);
        self
    }

    fn refuse<B: Body>(&self, error: &LockedError) -> Response<LockBody<B>> {
        let mut response = Response::new(LockBody { body: None, hold: Hold::Free });
        *response.status_mut() = (self.status)(error);
        if error.is_busy() {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }

    /// Handles a request under `lock`, unless the caller goes away before it is acquired.
    async fn handle<S, B, R>(
        self,
        lock: Result<Lock>,
        mut service: S,
        (mut parts, body): (Parts, B),
        gone: impl Future<Output = ()>,
    ) -> Result<Response<LockBody<R>>, S::Error>
    where
        S: Service<Request<B>, Response = Response<R>>,
        R: Body,
    {
        let acquired = tokio::select! {
            biased;
            // whatever is said, nobody hears it
            () = gone => Err(LockedError::Lock(Error::Closed)),
            acquired = expansion::acquire(lock, Some(self.wait), self.options.clone()) => acquired,
        };
        let guard = match acquired {
            Ok(guard) => Arc::new(guard),
            Err(error) => return Ok(self.refuse(&error)),
        };
        parts.extensions.insert(HeldLock(Arc::clone(&guard)));
        let handled = guard.run_until_lost(service.call(Request::from_parts(parts, body))).await;
        let response = match handled {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => {
                // the handler's error comes first
                let _ = release(guard).await;
                return Err(error);
            }
            Err(loss) => return Ok(self.refuse(&LockedError::Lost(loss))),
        };
        if self.until_body_end && !response.body().is_end_stream() {
            let watched = Arc::clone(&guard);
            let lost = Box::pin(async move { watched.lost().await });
            return Ok(response.map(|body| LockBody { body: Some(body), hold: Hold::Held { lost, guard } }));
        }
        Ok(match release(guard).await {
            Ok(()) => response.map(|body| LockBody { body: Some(body), hold: Hold::Free }),
            Err(loss) => self.refuse(&loss),
        })
    }
}

/// The table in the module's documentation.
fn status(error: &LockedError) -> StatusCode {
    match error {
        _ if error.is_busy() => StatusCode::CONFLICT,
        LockedError::Lost(_) | LockedError::Lock(Error::Closed) => StatusCode::SERVICE_UNAVAILABLE,
        LockedError::Lock(Error::InvalidName { .. }) => StatusCode::BAD_REQUEST,
        LockedError::Lock(error) if error.is_transient() => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// Releases, if nobody else has the lock; else the last who has it does.
async fn release(guard: Arc<LockGuard>) -> Result<(), LockedError> {
    match Arc::into_inner(guard) {
        Some(guard) => expansion::unlock(guard).await,
        None => Ok(()),
    }
}

impl<S> Layer<S> for LockLayer {
    type Service = LockService<S>;

    fn layer(&self, inner: S) -> LockService<S> {
        LockService { inner, layer: self.clone() }
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

/// What a [`LockLayer`] makes of a service.
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
    type Future = BoxFuture<Result<Self::Response, S::Error>>;

    /// As the service inside: there is no request yet to lock for.
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // a clone is not ready: it stays, and what is ready is called
        let clone = self.inner.clone();
        let mut service = mem::replace(&mut self.inner, clone);
        let layer = self.layer.clone();
        let (parts, body) = request.into_parts();
        let Some(lock) = (layer.lock)(&parts) else {
            return Box::pin(OwnerId::scope(async move {
                let response = service.call(Request::from_parts(parts, body)).await?;
                Ok(response.map(|body| LockBody { body: Some(body), hold: Hold::Free }))
            }));
        };
        if !layer.finish {
            return Box::pin(OwnerId::scope(layer.handle(lock, service, (parts, body), pending())));
        }
        Box::pin(async move {
            let refused = layer.clone();
            let (mut task_end, caller_end) = oneshot::channel::<()>();
            let handled =
                OwnerId::scope(async move { layer.handle(lock, service, (parts, body), task_end.closed()).await });
            let outcome = tokio::spawn(handled.in_current_span()).await;
            drop(caller_end);
            outcome.unwrap_or_else(|error| match error.try_into_panic() {
                Ok(panic) => panic::resume_unwind(panic),
                // the runtime is ending
                Err(_) => Ok(refused.refuse(&LockedError::Lock(Error::Closed))),
            })
        })
    }
}

/// The lock under which a request is handled, in its extensions. The lock is held while a clone of this lives.
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
    /// Dropped before its end, it releases in the background.
    pub struct LockBody<B: Body> {
        // without one, it is empty
        #[pin]
        body: Option<B>,
        hold: Hold<B::Data>,
    }
}

enum Hold<D> {
    Free,
    /// In this order: what watches has a clone of the guard.
    Held {
        lost: BoxFuture<Error>,
        guard: Arc<LockGuard>,
    },
    /// What the body said last is passed on when the lock is free.
    Releasing {
        release: BoxFuture<Result<(), LockedError>>,
        last: Option<Result<Frame<D>, BoxError>>,
    },
}

impl<B: Body> Body for LockBody<B>
where
    B::Error: Into<BoxError>,
{
    type Data = B::Data;
    type Error = BoxError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<B::Data>, BoxError>>> {
        let mut this = self.project();
        loop {
            match this.hold {
                Hold::Free => {
                    let Some(body) = this.body.as_pin_mut() else { return Poll::Ready(None) };
                    return body.poll_frame(cx).map_err(Into::into);
                }
                Hold::Held { lost, .. } => {
                    if let Poll::Ready(loss) = lost.as_mut().poll(cx) {
                        *this.hold = Hold::Free;
                        this.body.set(None);
                        return Poll::Ready(Some(Err(LockedError::Lost(loss).into())));
                    }
                    let Some(mut body) = this.body.as_mut().as_pin_mut() else { return Poll::Ready(None) };
                    let frame = ready!(body.as_mut().poll_frame(cx)).map(|frame| frame.map_err(Into::into));
                    if matches!(frame, Some(Ok(_))) && !body.is_end_stream() {
                        return Poll::Ready(frame);
                    }
                    if let Hold::Held { lost, guard } = mem::replace(this.hold, Hold::Free) {
                        drop(lost);
                        // it may have the request, and with that the lock
                        this.body.set(None);
                        *this.hold = Hold::Releasing { release: Box::pin(release(guard)), last: frame };
                    }
                }
                Hold::Releasing { release, last } => {
                    let released = ready!(release.as_mut().poll(cx));
                    let last = released.map_or_else(|loss| Some(Err(loss.into())), |()| last.take());
                    *this.hold = Hold::Free;
                    this.body.set(None);
                    return Poll::Ready(last);
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.hold, Hold::Free) && self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        match (&self.hold, &self.body) {
            // the last frame is not the body's any more
            (Hold::Releasing { .. }, _) => SizeHint::default(),
            (_, Some(body)) => body.size_hint(),
            (_, None) => SizeHint::with_exact(0),
        }
    }
}

impl<B: Body> fmt::Debug for LockBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockBody").field("holds_the_lock", &!matches!(self.hold, Hold::Free)).finish_non_exhaustive()
    }
}
