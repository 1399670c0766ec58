//! Where a request goes after a node rejected it.

use std::sync::Arc;

use nestlock_wire::{Call, Epoch, Link, Server};
use tokio::time::sleep;

use crate::{
    error::{StoreError, StoreErrorKind},
    store::{
        cluster::{
            Cluster,
            asking::AWAY,
            map::{SLOTS, host_of},
        },
        next_hop::RedirectTo,
    },
};

impl Cluster {
    /// Returns where a request about a slot goes after this error, or `None` if nowhere. Only a
    /// request that was not executed is redirected.
    pub(in super::super) fn next(
        &self,
        slot: u16,
        call: &Call,
        over: &Arc<Link>,
        error: &StoreError,
    ) -> Option<RedirectTo> {
        use StoreErrorKind as K;
        if error.may_have_executed() {
            self.request_refresh();
            return None;
        }
        match error.kind() {
            K::Moved => {
                let said = error.said();
                let mut words = said.split(' ');
                let (verb, slot, to) = (words.next()?, words.next()?.parse().ok()?, words.next()?);
                let slot = Some(slot).filter(|slot| usize::from(*slot) < SLOTS)?;
                if verb != "MOVED" {
                    return Some(RedirectTo::Asking(self.importing(&server(to, over)?)));
                }
                self.request_refresh();
                Some(RedirectTo::To(self.moved(slot, &server(to, over)?, over)))
            }
            // some of the keys have moved: a renewal of many locks is retried with fewer
            K::TryAgain if call.script.is_over_many() && call.keys.len() > 1 => None,
            K::TryAgain => Some(RedirectTo::Later),
            _ => {
                self.request_refresh();
                over.refused(error);
                // the node may have been left while the request was in flight
                let link = self.link(slot);
                if !Arc::ptr_eq(&link, over) {
                    return Some(RedirectTo::To(link));
                }
                // in a failover, a node may learn that it lost the slot before it learns which node
                // has it
                let knows_not =
                    error.kind() == K::ClusterDown && error.said().contains("slot not served");
                // the link was down when the request failed, and may be up now
                let is_up = error.kind() == K::Unavailable && over.is_up();
                let or_there = is_up || over.epoch() == Epoch::NONE;
                (knows_not || or_there).then_some(RedirectTo::Elsewhere { or_there })
            }
        }
    }

    /// Waits until a slot has a master other than this one, and returns its link. Keeps requesting
    /// refreshes until then.
    pub(in super::super) async fn next_master(
        &self,
        slot: u16,
        than: &Arc<Link>,
    ) -> Option<Arc<Link>> {
        let mut moves = self.moves();
        loop {
            let link = self.link(slot);
            if !Arc::ptr_eq(&link, than) {
                return Some(link);
            }
            self.request_refresh();
            let soon = {
                let _context = self.connect_options.own.enter();
                sleep(AWAY)
            };
            tokio::select! {
                changed = moves.changed() => changed.ok()?,
                () = soon => {}
            }
        }
    }
}

/// Parses the address in a redirect. Returns `None` if the node's host is not known.
fn server(said: &str, over: &Link) -> Option<Server> {
    let (host, port) = said.rsplit_once(':')?;
    Some(Server::new(
        host_of(Some(host), &over.host())?,
        port.parse().ok()?,
    ))
}
