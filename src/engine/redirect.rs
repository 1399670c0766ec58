//! Follows redirects: sends a request that a server refused to another node. The server did not
//! execute it, and the hold stays in doubt throughout.
//!
//! The redirect is one transition, so no other task sees the hold without its doubt. If the call
//! was given up in the meantime, nothing is sent. Decisions 19 and 21 say how redirects and stalled
//! migrations are handled.

use std::{pin::Pin, sync::Arc};

use nestlock_wire::{Call, Epoch, clock::Instant};

use super::{
    core::Core,
    hold::{
        Hold,
        state::{HoldRequest, HoldState, Ownership},
    },
};

use crate::{
    error::{StoreError, StoreErrorKind},
    store::{Acquired, Released, Route},
};

/// A server's reply to a release, and the connection that brought it.
type Said = Result<(Released, Epoch), StoreError>;

fn moved_error() -> StoreError {
    StoreError::new(
        StoreErrorKind::TryAgain,
        false,
        "keys of the lock are migrating to another node; try again",
    )
}

impl HoldState {
    /// Marks a request that was not executed as sent again, over another connection. Returns
    /// `false` if the hold is no longer this client's.
    fn redirect(&mut self, request: &HoldRequest, epoch: Epoch, now: Instant) -> bool {
        if self.ownership != Ownership::Ours {
            return false;
        }
        self.server = request.before;
        self.send(request, epoch, now);
        true
    }
}

impl Core {
    /// Runs a script that acquires or moves this hold, and follows redirects. Before each send, the
    /// hold is in doubt for the connection that carries it.
    pub(super) async fn acquire_by(
        &self,
        route: &mut Route,
        hold: &Arc<Hold>,
        request: &HoldRequest,
        call: &Call,
    ) -> Result<(Acquired, Epoch), StoreError> {
        loop {
            match self.store.acquire(route, call).await {
                Err(_) if self.follow(route, hold, request).await => {}
                answer => return answer,
            }
        }
    }

    /// Like [`Core::acquire_by`], for a script that releases this hold. If a migration delays its
    /// keys for long, releases the record alone.
    pub(super) async fn release_by(
        &self,
        route: &mut Route,
        hold: &Arc<Hold>,
        request: &HoldRequest,
        call: &Call,
    ) -> Result<(Released, Epoch), StoreError> {
        loop {
            match self.store.release(route, call).await {
                Err(_) if self.follow(route, hold, request).await => {}
                answer => return answer,
            }
            if route.is_held_up()
                && let Some(alone) = hold
                    .kind_as_acquired()
                    .release_record(&request.owner, request.count)
                && let Some(answer) = self.release_record(route, hold, request, alone).await
            {
                return answer;
            }
        }
    }

    /// Releases the record alone. Returns `None` if that was refused or proves nothing: the request
    /// for the whole lock must be sent again. Boxed, as it is rare.
    fn release_record<'a>(
        &'a self,
        route: &'a mut Route,
        hold: &'a Arc<Hold>,
        request: &'a HoldRequest,
        alone: Call,
    ) -> Pin<Box<dyn Future<Output = Option<Said>> + Send + 'a>> {
        Box::pin(async move {
            loop {
                let refused = match self.store.release(route, &alone).await {
                    // `NotHeld` proves nothing: the owner may be in the queue, which is at another
                    // key
                    Ok((Released::NotHeld, _)) if !hold.kind().record_is_all() => moved_error(),
                    Err(error) if error.may_have_executed() => return Some(Err(error)),
                    Err(error) if error.kind() == StoreErrorKind::Moved => moved_error(),
                    Err(error) => error,
                    answer => return Some(answer),
                };
                let goes_elsewhere = route.goes_elsewhere();
                if !goes_elsewhere {
                    route.wait();
                }
                if !self.follow(route, hold, request).await {
                    return Some(Err(refused));
                }
                if !goes_elsewhere {
                    return None;
                }
            }
        })
    }

    /// Redirects a request that was not executed. The hold is in doubt throughout, so no other task
    /// sees it as it was before. Returns `false` if the request is not sent again.
    async fn follow(&self, route: &mut Route, hold: &Arc<Hold>, request: &HoldRequest) -> bool {
        self.store.follow(route).await
            && hold.change(|state, _| state.redirect(request, route.epoch(), Instant::now()))
    }
}
