//! Why a cache returns no value.

use std::{sync::Arc, time::Duration};

/// Why a call returns no value.
///
/// ```
/// use nestlock_recipes::cached::CacheError;
///
/// /// Returns the HTTP status of a request that needs the value.
/// fn status(error: &CacheError) -> u16 {
///     match error {
///         CacheError::Busy(_) | CacheError::FailedElsewhere(_) => 503,
///         _ => 500,
///     }
/// }
/// assert_eq!(status(&CacheError::Panicked), 500);
/// ```
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// The fill returned this error. All callers that waited for the fill get it.
    #[error("the fill failed: {0}")]
    Fill(#[source] Arc<dyn std::error::Error + Send + Sync>),
    /// A fill of this key failed with this message less than [`Cached::error_ttl`] ago. Try again
    /// later.
    ///
    /// [`Cached::error_ttl`]: super::Cached::error_ttl
    #[error("a fill of this key failed recently, and is not retried yet: {0}")]
    FailedElsewhere(Arc<str>),
    /// Another caller was filling the value for all of [`Cached::wait`].
    ///
    /// [`Cached::wait`]: super::Cached::wait
    #[error("another caller has been filling this key for {0:?}; try again later")]
    Busy(Duration),
    /// The lock of the fill failed: the key is not valid as a name, the server does not reply, or
    /// the lock was lost and the fill dropped. After a loss, a caller that shared the fill gets
    /// this error only if its own [`Cached::wait`] is over; otherwise it fills the value itself.
    ///
    /// [`Cached::wait`]: super::Cached::wait
    #[error("the lock of the fill failed: {0}")]
    Lock(#[source] Arc<nestlock::Error>),
    /// The store could not be read, or took longer than 3 s.
    #[error("the store of the cache failed: {0}")]
    Store(#[source] Arc<dyn std::error::Error + Send + Sync>),
    /// The fill panicked, or its runtime has ended.
    #[error("the fill panicked, or its runtime has ended")]
    Panicked,
}

impl CacheError {
    /// Returns whether the error is about one fill only: callers that waited for that fill run
    /// their own instead.
    pub(super) fn is_of_its_fill(&self) -> bool {
        match self {
            Self::Busy(_) => true,
            Self::Lock(error) => error.is_lost(),
            _ => false,
        }
    }
}

impl From<nestlock::Error> for CacheError {
    fn from(error: nestlock::Error) -> Self {
        Self::Lock(Arc::new(error))
    }
}
