//! Trying again: after how long.

use uuid::Uuid;

/// A number from 0 to 1, for jitter.
pub(crate) fn random_fraction() -> f64 {
    f64::from(u32::from_le_bytes(*Uuid::new_v4().as_bytes().first_chunk().unwrap_or(&[0; 4]))) / f64::from(u32::MAX)
}
