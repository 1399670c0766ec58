//! A broken promise, as a check finds it.

use std::fmt::Display;

use super::op::Op;

/// A broken promise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Violation {
    pub(crate) sort: &'static str,
    pub(crate) time: u64,
    pub(crate) text: String,
    /// The ids of the operations that it is about.
    pub(crate) words: Vec<String>,
}

impl Violation {
    pub(super) fn of(sort: &'static str, op: &Op, time: u64, text: impl Display) -> Self {
        let text = format!("{} {} of {}: {text}", op.locks.join("+"), op.id, op.task);
        Self {
            sort,
            time,
            text,
            words: vec![op.id.clone()],
        }
    }

    pub(crate) fn of_the_run(time: u64, text: String) -> Self {
        Self {
            sort: "end",
            time,
            text,
            words: Vec::new(),
        }
    }
}
