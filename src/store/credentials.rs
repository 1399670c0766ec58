//! The program's credentials, from a function that it passes.

use std::{error::Error as StdError, fmt, future::Future, sync::Arc};

use async_trait::async_trait;
use nestlock_wire::{Address, CredentialProvider, Credentials, NotConnected};

use crate::error::{StoreError, StoreErrorKind};

/// The credential provider of a client.
#[derive(Clone)]
pub(crate) struct Provider(pub(super) Arc<dyn CredentialProvider>);

impl fmt::Debug for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Provider(..)")
    }
}

impl Provider {
    pub(crate) fn new<F, C, E>(fetch: F) -> Self
    where
        F: Fn() -> C + Send + Sync + 'static,
        C: Future<Output = Result<Credentials, E>> + Send + 'static,
        E: Into<Box<dyn StdError + Send + Sync>>,
    {
        Self(Arc::new(FromFn(fetch)))
    }
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
            let why = format!("no credentials: {}", error.into());
            NotConnected {
                error: StoreError::new(StoreErrorKind::Unavailable, false, why),
                nobody_listens: false,
            }
        })
    }
}
