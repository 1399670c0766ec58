//! The way of one request: over which link, under which number, until when.

use std::sync::Arc;

use super::{
    acks::Receipt,
    cluster::Next,
    link::{Epoch, Link},
    wire::Until,
};
use crate::options::Copies;

/// Found once for each attempt: what is sent goes where its doubt was noted.
#[derive(Debug)]
pub(crate) struct Route {
    pub(super) link: Arc<Link>,
    epoch: Epoch,
    pub(super) until: Until,
    /// The slot that it is about, in a cluster.
    pub(super) slot: u16,
    /// For a node that is about to have its slot.
    pub(super) asking: bool,
    /// How often it was sent elsewhere.
    pub(super) hops: u32,
    /// Where it goes, after it was refused.
    pub(super) next: Option<Next>,
    /// Who must have what it writes, before that counts.
    pub(crate) copies: Option<Copies>,
    /// What to ask that by, of the last request.
    pub(super) receipt: Option<Receipt>,
}

impl Route {
    pub(super) fn new(link: Arc<Link>, until: Until, slot: u16) -> Self {
        let epoch = link.epoch();
        Self { link, epoch, until, slot, asking: false, hops: 0, next: None, copies: None, receipt: None }
    }

    /// The connection that a request goes over which is sent now. Should that have ended by then, it goes over the link's next
    /// one, and the answer has another number.
    pub(crate) fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Goes on over another link.
    pub(super) fn turn(&mut self, link: Arc<Link>, asking: bool) {
        (self.epoch, self.asking) = (link.epoch(), asking);
        self.link = link;
    }
}
