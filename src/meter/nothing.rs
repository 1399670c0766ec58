//! Without the feature `metrics`: the same calls, which do nothing.

use std::time::Duration;

use super::{HoldEnd, Of, Outcome, Renewal, Source};

/// Takes no room.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Meter(());

#[expect(clippy::unused_self, reason = "as with the feature")]
impl Meter {
    pub(crate) fn acquire(self, _: Of<'_>, _: Outcome, _: Duration) {}
    pub(crate) fn hold(self, _: Of<'_>, _: HoldEnd, _: Duration) {}
    pub(crate) fn renewals(self, _: Vec<Renewal>) {}
    pub(crate) fn wakeup(self, _: Of<'_>, _: Source) {}
    pub(crate) fn settlement(_: &'static str) {}
    pub(crate) fn ghost() {}
    pub(crate) fn reconnect(_: &'static str) {}
}
