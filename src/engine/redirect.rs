//! A request that a server has sent elsewhere, not having executed it: the doubt goes along.

use std::sync::Arc;

use super::{
    core::Core,
    hold::Hold,
    state::{Request, Standing, State},
};
use crate::{
    clock::Instant,
    error::StoreError,
    store::{Acquired, Call, Epoch, Released, Route},
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
    /// Runs a script that acquires or moves this hold, wherever it is sent: its doubt goes along.
    pub(super) async fn acquire_by(
        &self,
        route: &mut Route,
        (hold, request): (&Arc<Hold>, &Request),
        call: &Call,
    ) -> Result<(Acquired, Epoch), StoreError> {
        loop {
            match self.store.acquire(route, call).await {
                Err(_) if self.follow(route, hold, request).await => {}
                answer => return answer,
            }
        }
    }

    /// The same for a script that releases it.
    pub(super) async fn release_by(
        &self,
        route: &mut Route,
        (hold, request): (&Arc<Hold>, &Request),
        call: &Call,
    ) -> Result<(Released, Epoch), StoreError> {
        loop {
            match self.store.release(route, call).await {
                Err(_) if self.follow(route, hold, request).await => {}
                answer => return answer,
            }
        }
    }

    /// Turns a request, which was not executed, to where it goes now. Its doubt is never gone in between: nobody else sees the
    /// hold as it was before. `false`: it goes nowhere.
    async fn follow(&self, route: &mut Route, hold: &Arc<Hold>, request: &Request) -> bool {
        self.store.follow(route).await && hold.change(|state, _| state.redirect(request, route.epoch(), Instant::now()))
    }
}
