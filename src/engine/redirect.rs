//! A request that a server has sent elsewhere, not having executed it: the doubt goes along.

use std::{pin::Pin, sync::Arc};

use super::{
    core::Core,
    hold::Hold,
    state::{Request, Standing, State},
};
use crate::{
    clock::Instant,
    error::{StoreError, StoreErrorKind},
    store::{Acquired, Call, Epoch, Released, Route},
};

/// What a server said to a release, over which connection.
type Said = Result<(Released, Epoch), StoreError>;

fn on_their_way() -> StoreError {
    StoreError::new(StoreErrorKind::TryAgain, false, "keys of the lock are on their way to another node")
}

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

    /// The same for a script that releases it. Where its keys are on their way for long, its record is released alone.
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
            if route.is_held_up()
                && let Some(alone) = hold.kind().release_record(&request.owner, request.count)
                && let Some(answer) = self.release_record(route, (hold, request), alone).await
            {
                return answer;
            }
        }
    }

    /// Releases the record alone. `None`: that was refused, or says nothing, and the whole lock is asked for again. In a box, as
    /// it is rare.
    fn release_record<'a>(
        &'a self,
        route: &'a mut Route,
        (hold, request): (&'a Arc<Hold>, &'a Request),
        alone: Call,
    ) -> Pin<Box<dyn Future<Output = Option<Said>> + Send + 'a>> {
        Box::pin(async move {
            loop {
                let refused = match self.store.release(route, &alone).await {
                    // it may have a place in the queue
                    Ok((Released::NotHeld, _)) if !hold.kind().record_is_all() => on_their_way(),
                    Err(error) if error.may_have_executed() => return Some(Err(error)),
                    Err(error) if error.kind() == StoreErrorKind::Moved => on_their_way(),
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

    /// Turns a request, which was not executed, to where it goes now. Its doubt is never gone in between: nobody else sees the
    /// hold as it was before. `false`: it goes nowhere.
    async fn follow(&self, route: &mut Route, hold: &Arc<Hold>, request: &Request) -> bool {
        self.store.follow(route).await && hold.change(|state, _| state.redirect(request, route.epoch(), Instant::now()))
    }
}
