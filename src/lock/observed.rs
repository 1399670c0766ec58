//! One acquire, as it is traced and measured.

use tracing::{Level, Span, field::Empty};

use super::{Inner, Lock};
use crate::{
    clock::Instant,
    error::Result,
    guard::LockGuard,
    meter::{self, Meter, Of, Outcome},
    options::{Wait, millis},
    token::FencingToken,
};

/// One acquire. When dropped before its end, it was cancelled.
pub(super) struct Observed<'l> {
    lock: &'l Lock,
    waits: bool,
    /// In a box, so that a waiter stays small.
    span: Option<Box<Span>>,
    /// `None`: nobody wants to know, or it was told.
    began: Option<Instant>,
}

impl<'l> Observed<'l> {
    pub(super) fn begin(lock: &'l Lock, wait: Wait) -> Self {
        // asks no subscriber where none listens to this level
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
        Self { lock, waits: wait != Wait::No, span, began }
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
                if guard.is_re_entry() { Outcome::Reentered } else { Outcome::Acquired }
            }
            Ok(None) if self.waits => Outcome::Timeout,
            Ok(None) => Outcome::Busy,
            Err(error) => Outcome::failed(error),
        };
        self.tell(outcome);
    }

    fn tell(&mut self, outcome: Outcome) {
        let Some(took) = self.began.take().map(Instant::elapsed) else { return };
        if let Some(span) = &self.span {
            span.record("outcome", outcome.name());
            span.record("waited_ms", millis(took));
        }
        self.lock.meter().acquire(self.lock.what(), outcome, took);
    }
}

impl Drop for Observed<'_> {
    fn drop(&mut self) {
        self.tell(Outcome::Cancelled);
    }
}

impl Lock {
    fn what(&self) -> Of<'_> {
        match &self.inner {
            Inner::One(single) => single.kind.of(),
            Inner::Several(several) => Of { kind: several.label(), lock: several.name() },
        }
    }

    fn meter(&self) -> Meter {
        match &self.inner {
            Inner::One(single) => single.anchor.config.meter,
            // all of its members' clients count as the first one's
            Inner::Several(several) => several.members().first().map(Self::meter).unwrap_or_default(),
        }
    }
}
