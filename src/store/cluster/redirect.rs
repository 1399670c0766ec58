//! Where a request goes next that a node has refused.

use std::{sync::Arc, time::Duration};

use fred::types::config::Server;
use tokio::time::sleep;

use super::{
    Cluster,
    asking::AWAY,
    map::{SLOTS, host_of},
};
use crate::{
    error::{StoreError, StoreErrorKind},
    store::{
        link::{Epoch, Link},
        script::Call,
    },
};

/// Redirects that are followed without a pause.
const AT_ONCE: u32 = 5;

/// Where a request goes next.
#[derive(Debug)]
pub(in super::super) enum Next {
    /// To the slot's new master.
    To(Arc<Link>),
    /// To the node that imports its slot: this time only.
    Asking(Arc<Link>),
    /// There again, a little later: its keys are on their way.
    Later,
    /// To whom the map names next, as who it names now does not know the slot; or, if it is that nobody is let in there, there when
    /// somebody is.
    Elsewhere { or_there: bool },
}

impl Next {
    /// The pause before it, after so many redirects.
    pub(in super::super) fn pause(&self, hops: u32) -> Duration {
        let ms = match self {
            Self::Later => 1 << hops.clamp(1, 6),
            Self::Elsewhere { .. } => 0,
            _ if hops <= AT_ONCE => 0,
            _ => 10 << (hops - AT_ONCE).min(6),
        };
        Duration::from_millis(ms.min(if matches!(self, Self::Later) { 50 } else { 500 }))
    }
}

impl Cluster {
    /// Where a request about a slot goes after this error. `None`: nowhere. Only what was not executed goes on.
    pub(in super::super) fn next(&self, slot: u16, call: &Call, over: &Arc<Link>, error: &StoreError) -> Option<Next> {
        use StoreErrorKind as K;
        if error.may_have_executed() {
            self.ring();
            return None;
        }
        match error.kind() {
            K::Moved => {
                let said = error.said();
                let mut words = said.split(' ');
                let (verb, slot, to) = (words.next()?, words.next()?.parse().ok()?, words.next()?);
                let slot = Some(slot).filter(|slot| usize::from(*slot) < SLOTS)?;
                if verb != "MOVED" {
                    return Some(Next::Asking(self.importing(&server(to, over)?)));
                }
                self.ring();
                Some(Next::To(self.moved(slot, &server(to, over)?, over)))
            }
            // half of them are there: whoever renews many asks for fewer
            K::TryAgain if call.script.is_over_many() && call.keys.len() > 1 => None,
            K::TryAgain => Some(Next::Later),
            _ => {
                self.ring();
                over.refused(error);
                // it was left meanwhile
                let link = self.link(slot);
                if !Arc::ptr_eq(&link, over) {
                    return Some(Next::To(link));
                }
                // in a failover, it may hear that it has the slot no more before it hears who has
                let knows_not = error.kind() == K::ClusterDown && error.said().contains("slot not served");
                // what was down a moment ago may be up
                let is_up = error.kind() == K::Unavailable && over.is_up();
                let or_there = is_up || over.epoch() == Epoch::NONE;
                (knows_not || or_there).then_some(Next::Elsewhere { or_there })
            }
        }
    }

    /// The link to the next master of a slot that is another one than this. Meanwhile the map is asked for again and again.
    pub(in super::super) async fn next_master(&self, slot: u16, than: &Arc<Link>) -> Option<Arc<Link>> {
        let mut moves = self.moves();
        loop {
            let link = self.link(slot);
            if !Arc::ptr_eq(&link, than) {
                return Some(link);
            }
            self.ring();
            let soon = {
                let _context = self.dials.own.enter();
                sleep(AWAY)
            };
            tokio::select! {
                changed = moves.changed() => changed.ok()?,
                () = soon => {}
            }
        }
    }
}

/// An address as redirects have it. `None`: nobody knows where that is.
fn server(said: &str, over: &Link) -> Option<Server> {
    let (host, port) = said.rsplit_once(':')?;
    Some(Server::new(host_of(Some(host), &over.host())?, port.parse().ok()?))
}
