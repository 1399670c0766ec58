//! The rows of the report: what was checked, its result, and why.

/// The result of a check, worst last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Verdict {
    Ok,
    /// It could not be checked.
    Unknown,
    Warn,
    Bad,
}

impl Verdict {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Unknown => "unknown",
            Self::Warn => "warn",
            Self::Bad => "bad",
        }
    }
}

/// A check, its result, and the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) what: String,
    pub(super) verdict: Verdict,
    pub(super) why: String,
}

pub(super) fn row(what: impl Into<String>, verdict: Verdict, why: impl Into<String>) -> Row {
    Row {
        what: what.into(),
        verdict,
        why: why.into(),
    }
}
