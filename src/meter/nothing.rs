//! The same calls without the feature `metrics`: they do nothing.

use std::time::Duration;

use super::{AcquireOutcome, HoldEnd, Of, RenewalOutcome, Source};

/// Takes no memory.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Meter(());

#[expect(clippy::unused_self, reason = "as with the feature")]
impl Meter {
    pub(crate) fn acquire(self, _: Of<'_>, _: AcquireOutcome, _: Duration) {}
    pub(crate) fn hold(self, _: Of<'_>, _: HoldEnd, _: Duration) {}
    pub(crate) fn renewals(self, _: Vec<RenewalOutcome>) {}
    pub(crate) fn wakeup(self, _: Of<'_>, _: Source) {}
    pub(crate) fn settlement(_: &'static str) {}
    pub(crate) fn ghost() {}
    pub(crate) fn reconnect(_: &'static str) {}
}
