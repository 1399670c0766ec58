//! Any kind, but its owner may not take it again. Redisson's `NonReentrantLock` and `NonReentrantFairLock`.
//!
//! An owner is never in two clients, so the client's own books know whether it holds the lock: nothing is sent.

use std::sync::Arc;

use crate::{
    engine::{Kind, Request, Sibling, Together, Wake},
    owner::OwnerId,
    store::{Call, Script},
};

#[derive(Debug)]
pub(crate) struct NonReentrant<K>(pub(crate) K);

impl<K: Kind> Kind for NonReentrant<K> {
    fn is_reentrant(&self) -> bool {
        false
    }

    fn name(&self) -> &Arc<str> {
        self.0.name()
    }

    fn family(&self) -> &'static str {
        self.0.family()
    }

    fn wake(&self, owner: &OwnerId) -> Wake {
        self.0.wake(owner)
    }

    fn has_token(&self) -> bool {
        self.0.has_token()
    }

    fn queues(&self) -> bool {
        self.0.queues()
    }

    fn has_own_channel(&self) -> bool {
        self.0.has_own_channel()
    }

    fn shares(&self) -> bool {
        self.0.shares()
    }

    fn sibling(&self) -> Option<Sibling> {
        self.0.sibling()
    }

    fn acquire(&self, request: Request<'_>) -> Call {
        self.0.acquire(request)
    }

    fn release(&self, owner: &OwnerId, holds: u32) -> Call {
        self.0.release(owner, holds)
    }

    fn renew(&self) -> &'static Script {
        self.0.renew()
    }

    fn together(&self) -> Option<Together> {
        self.0.together()
    }

    fn force_release(&self) -> Call {
        self.0.force_release()
    }

    fn inspect(&self) -> Call {
        self.0.inspect()
    }
}
