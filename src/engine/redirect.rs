//! A request that a server has sent elsewhere, not having executed it: the doubt goes along.

use std::sync::Arc;

use super::{
    core::Core,
    hold::Hold,
    state::{Request, Standing, State},
};
use crate::{
    clock::Instant,
    store::{Epoch, Route},
};

impl State {
    /// The request was not executed, and goes out once more, over another connection. `false`: nobody wants it any more.
    fn redirect(&mut self, request: &Request, epoch: Epoch, now: Instant) -> bool {
        if self.standing != Standing::Ours {
            return false;
        }
        self.server = request.before;
        self.send(request, epoch, now);
        true
    }
}

impl Core {
    /// Turns a request about these holds, which was not executed, to where it goes now. The doubt is never gone in between:
    /// nobody else sees the hold as it was before. `false`: it goes nowhere.
    pub(super) async fn follow<'h>(
        &self,
        route: &mut Route,
        holds: impl IntoIterator<Item = (&'h Arc<Hold>, &'h Request)>,
    ) -> bool {
        if !self.store.follow(route).await {
            return false;
        }
        let (epoch, now) = (route.epoch(), Instant::now());
        // of all, also where one has no use for it
        holds.into_iter().fold(true, |goes_on, (hold, request)| {
            hold.change(|state, _| state.redirect(request, epoch, now)) && goes_on
        })
    }
}
