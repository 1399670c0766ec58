//! A stub of `nestlock_recipes`.

pub mod nestlock {
    use std::time::Duration;

    pub struct LockClient;
    pub struct Lock;
    pub struct LockGuard;
    pub struct AcquireOptions;
    pub struct Lost;

    impl LockClient {
        pub fn mutex(&self, _name: impl AsRef<str>) -> Lock {
            Lock
        }
    }

    impl LockGuard {
        pub async fn run_until_lost<F: Future>(&self, future: F) -> Result<F::Output, Lost> {
            Ok(future.await)
        }
    }

    impl AcquireOptions {
        pub fn new() -> Self {
            Self
        }

        pub fn lease(self, _lease: Duration) -> Self {
            self
        }
    }
}

pub mod locked {
    pub struct LockedError;

    pub mod expansion {
        use std::time::Duration;

        use super::{
            super::nestlock::{AcquireOptions, Lock, LockGuard, Lost},
            LockedError,
        };

        pub async fn acquire(
            _lock: Lock,
            _wait: Option<Duration>,
            _options: AcquireOptions,
        ) -> Result<LockGuard, LockedError> {
            Err(LockedError)
        }

        pub async fn release<T, E: From<LockedError>>(
            _guard: LockGuard,
            outcome: Result<Result<T, E>, Lost>,
        ) -> Result<T, E> {
            outcome.unwrap_or_else(|Lost| Err(LockedError.into()))
        }

        pub fn never<T>() -> T {
            unreachable!()
        }
    }
}
