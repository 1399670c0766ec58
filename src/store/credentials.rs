//! The program's credentials, from a function that it passes.

use std::{error::Error as StdError, future::Future};

use async_trait::async_trait;
use nestlock_wire::{Address, CredentialProvider, CredentialSource, Credentials, NotConnected};

use crate::error::StoreErrorKind;

/// Returns the source of what `fetch` returns.
pub(crate) fn from_fn<F, C, E>(fetch: F) -> CredentialSource
where
    F: Fn() -> C + Send + Sync + 'static,
    C: Future<Output = Result<Credentials, E>> + Send + 'static,
    E: Into<Box<dyn StdError + Send + Sync>>,
{
    FromFn(fetch).into()
}

struct FromFn<F>(F);

#[async_trait]
impl<F, C, E> CredentialProvider for FromFn<F>
where
    F: Fn() -> C + Send + Sync,
    C: Future<Output = Result<Credentials, E>> + Send,
    E: Into<Box<dyn StdError + Send + Sync>>,
{
    async fn fetch(&self, _: &Address) -> Result<Credentials, NotConnected> {
        (self.0)().await.map_err(|error| {
            let why = format!("the function for `credentials` failed: {}", error.into());
            NotConnected::new(StoreErrorKind::Unavailable, why)
        })
    }

    fn is_by_server(&self) -> bool {
        false
    }
}
