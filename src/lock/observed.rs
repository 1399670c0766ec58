//! Tracing and metrics of one acquire.

use nestlock_wire::clock::{Instant, millis};
use tracing::{Level, Span, field::Empty};

use crate::{
    error::Result,
    guard::LockGuard,
    lock::handle::{Lock, LockInner},
    meter::{self, AcquireOutcome, Meter, Of},
    options::Wait,
    token::FencingToken,
};

/// The observation of one acquire. If dropped before [`Observed::end`], the acquire was cancelled.
pub(super) struct Observed<'l> {
    lock: &'l Lock,
    waits: bool,
    /// Boxed to keep waiters small.
    span: Option<Box<Span>>,
    /// When the acquire began. `None` if it is not observed, or was already reported.
    began: Option<Instant>,
}

impl<'l> Observed<'l> {
    pub(super) fn begin(lock: &'l Lock, wait: Wait) -> Self {
        // This check calls no subscriber if none listens at this level.
        let span = tracing::enabled!(Level::DEBUG).then(|| {
            Box::new(tracing::debug_span!(
                "nestlock.acquire",
                otel.kind = "client",
                lock = lock.name(),
                kind = lock.what().kind,
                owner = Empty,
                outcome = Empty,
                waited_ms = Empty,
                token = Empty,
            ))
        });
        let began = (meter::IS_ON || span.is_some()).then(Instant::now);
        Self {
            lock,
            waits: wait != Wait::No,
            span,
            began,
        }
    }

    pub(super) fn span(&self) -> Option<Span> {
        self.span.as_deref().cloned()
    }

    pub(super) fn end(&mut self, outcome: &Result<Option<LockGuard>>) {
        if self.began.is_none() {
            return;
        }
        let outcome = match outcome {
            Ok(Some(guard)) => {
                if let Some(span) = &self.span {
                    span.record("owner", tracing::field::display(guard.owner()));
                    span.record("token", guard.fencing_token().map(FencingToken::get));
                }
                if guard.is_re_entry() {
                    AcquireOutcome::Reentered
                } else {
                    AcquireOutcome::Acquired
                }
            }
            Ok(None) if self.waits => AcquireOutcome::Timeout,
            Ok(None) => AcquireOutcome::Busy,
            Err(error) => AcquireOutcome::failed(error),
        };
        self.tell(outcome);
    }

    fn tell(&mut self, outcome: AcquireOutcome) {
        let Some(took) = self.began.take().map(Instant::elapsed) else {
            return;
        };
        if let Some(span) = &self.span {
            span.record("outcome", outcome.name());
            span.record("waited_ms", millis(took));
        }
        self.lock.meter().acquire(self.lock.what(), outcome, took);
    }
}

impl Drop for Observed<'_> {
    fn drop(&mut self) {
        self.tell(AcquireOutcome::Cancelled);
    }
}

impl Lock {
    fn what(&self) -> Of<'_> {
        match &self.inner {
            LockInner::One(single) => single.kind.of(),
            LockInner::Several(several) => Of {
                kind: several.label(),
                lock: several.name(),
            },
        }
    }

    fn meter(&self) -> Meter {
        match &self.inner {
            LockInner::One(single) => single.anchor.config.meter,
            // The clients of all members count as the first one's.
            LockInner::Several(several) => several
                .members()
                .first()
                .map(Self::meter)
                .unwrap_or_default(),
        }
    }
}
