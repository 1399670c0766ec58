//! The scripts that the server of a connection knows.
//!
//! A script's text goes with its first use on a connection, its digest from then on. So requests
//! are executed in the order in which they were sent, and no second round trip is needed. The text
//! is sent again if it was refused before it was read (`LOADING`, `BUSY`, `MOVED`), or not sent in
//! time; not after `NOPERM`: every second call of a user without EVALSHA would be refused. Decision
//! 16.

use smallvec::SmallVec;

use crate::{error::StoreErrorKind, refusal};

/// The scripts whose texts were sent over a connection. From then on the digest is enough, since
/// the server executes requests in order; a server that has forgotten a script says so. Trying the
/// digest first would cost a round trip if the server does not know the script: a request with a
/// short wait may not have that time.
#[derive(Debug, Default)]
pub(crate) struct Texts(SmallVec<[usize; 8]>);

impl Texts {
    /// Returns how to run a script: EVAL and its text the first time, then EVALSHA and its digest.
    pub(crate) fn verb(
        &mut self,
        text: &'static str,
        digest: &'static str,
    ) -> (&'static str, &'static str) {
        if self.knows(text) {
            ("EVALSHA", digest)
        } else {
            self.again(text)
        }
    }

    /// Returns EVAL and the text, whether it was sent before or not.
    pub(crate) fn again(&mut self, text: &'static str) -> (&'static str, &'static str) {
        self.learn(text);
        ("EVAL", text)
    }

    pub(crate) fn knows(&self, text: &'static str) -> bool {
        // a text is created once and never moves, so its address identifies it
        self.0.contains(&(text.as_ptr() as usize))
    }

    pub(crate) fn learn(&mut self, text: &'static str) {
        if !self.knows(text) {
            self.0.push(text.as_ptr() as usize);
        }
    }

    /// Handles the refusal of a script. Forgets all texts if the server has forgotten one, and so
    /// perhaps others, or refused the request before it read the text.
    pub(crate) fn refused(&mut self, error: &str) {
        use StoreErrorKind as K;
        let unread = [
            K::NoScript,
            K::Moved,
            K::TryAgain,
            K::Busy,
            K::Loading,
            K::MasterDown,
            K::ClusterDown,
        ];
        if unread.contains(&refusal::verdict(error).0) {
            self.forget();
        }
    }

    /// Forgets all texts, because a script was not sent, or may not have been.
    pub(crate) fn forget(&mut self) {
        self.0.clear();
    }
}
