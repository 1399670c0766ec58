//! The way of one request: over which link, under which number, until when.

use std::sync::Arc;

use super::{
    link::{Epoch, Link},
    wire::Until,
};

/// Found once for each attempt: what is sent goes where its doubt was noted.
#[derive(Debug)]
pub(crate) struct Route {
    pub(super) link: Arc<Link>,
    epoch: Epoch,
    pub(super) until: Until,
}

impl Route {
    pub(super) fn new(link: Arc<Link>, until: Until) -> Self {
        let epoch = link.epoch();
        Self { link, epoch, until }
    }

    /// The connection that a request goes over which is sent now. Should that have ended by then, it goes over the link's next
    /// one, and the answer has another number.
    pub(crate) fn epoch(&self) -> Epoch {
        self.epoch
    }
}
