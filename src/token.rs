//! Fencing tokens.

mod checked;

use std::{fmt, num::NonZeroU64};

/// A fencing token: a number, from 1 to 2^53 - 1, that increases from holder to holder of a fenced
/// lock. There is no zero.
///
/// [`LockGuard::fencing_token`](crate::LockGuard::fencing_token) returns it; the guarded resource
/// rejects tokens lower than the highest it has seen. It fits an integer column of any database,
/// and a number in JSON.
///
/// ```
/// use nestlock::FencingToken;
///
/// let (early, late) = (FencingToken::try_from(41)?, FencingToken::try_from(42)?);
/// assert!(early < late);
/// let column: i64 = late.into();
/// assert_eq!(column, 42);
/// assert!(FencingToken::try_from(0).is_err());
/// # Ok::<(), nestlock::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FencingToken(NonZeroU64);

impl FencingToken {
    /// Returns the token with the number that the server counted.
    pub(crate) fn recorded(token: NonZeroU64) -> Self {
        Self(token)
    }

    /// Returns the number.
    #[must_use]
    pub fn get(self) -> u64 {
        self.0.get()
    }
}

impl From<FencingToken> for u64 {
    fn from(token: FencingToken) -> Self {
        token.get()
    }
}

/// For a database column. It always fits: no token is higher than 2^53 - 1.
impl From<FencingToken> for i64 {
    fn from(token: FencingToken) -> Self {
        token.get().cast_signed()
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
