//! The context of the running script.

use std::cell::{Cell, RefCell};

use crate::server::resp::Protocol;

/// The context of the running script: its client, its database and what it may do.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) client: Cell<u64>,
    pub(super) db: Cell<usize>,
    pub(super) read_only: Cell<bool>,
    pub(super) protocol: Cell<Protocol>,
    pub(super) sha: RefCell<String>,
}
