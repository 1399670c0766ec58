//! Converts numbers into tokens, and checks them.

use std::num::NonZeroU64;

use crate::{error::Error, token::FencingToken};

/// The highest token: Lua's numbers cannot distinguish all higher integers.
const MAX: u64 = (1 << 53) - 1;

/// Checks a number that another process has passed on.
impl TryFrom<u64> for FencingToken {
    type Error = Error;

    fn try_from(token: u64) -> Result<Self, Error> {
        match NonZeroU64::new(token) {
            Some(token) if token.get() <= MAX => Ok(Self(token)),
            _ => Err(Error::InvalidToken { token }),
        }
    }
}
