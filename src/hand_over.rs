//! The hand-over: a hold on its way from one process to another.

use std::{fmt, sync::Arc};

use crate::{
    error::{Error, Result},
    owner::OwnerId,
};

/// The prefix of each text: version 1 of the format.
const VERSION: &str = "nl1.";

/// A hold on its way to another task or process: created by
/// [`LockGuard::hand_over`](crate::LockGuard::hand_over), and taken over by
/// [`Lock::adopt`](crate::Lock::adopt), once.
///
/// It is a capability: any client that has it can take the lock. Therefore its `Debug` output omits
/// the secret; [`to_text`](Self::to_text) returns the text for a message to the other process. Keep
/// that text out of logs and URLs.
///
/// ```no_run
/// # async fn example(
/// #     client: nestlock::LockClient,
/// #     worker: nestlock::LockClient,
/// # ) -> nestlock::Result<()> {
/// use std::time::Duration;
/// use nestlock::HandOver;
///
/// let guard = client.mutex("order:7")?.lock().await?;
/// let text = guard.hand_over(Duration::from_secs(30)).await?.to_text();
/// // elsewhere
/// let guard = worker.mutex("order:7")?.adopt(&HandOver::from_text(&text)?).await?;
/// guard.unlock().await
/// # }
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct HandOver {
    /// The family of the lock kind: kinds of one family share their records.
    family: Arc<str>,
    lock: Arc<str>,
    owner: OwnerId,
}

impl HandOver {
    pub(crate) fn new(family: &str, lock: &Arc<str>, owner: OwnerId) -> Self {
        Self {
            family: family.into(),
            lock: Arc::clone(lock),
            owner,
        }
    }

    /// Returns the lock's name, with its client's prefix.
    #[must_use]
    pub fn lock_name(&self) -> &str {
        &self.lock
    }

    /// Returns the placeholder that owns the lock until it is adopted. Fails if the hand-over is
    /// for another lock or another family of kinds.
    pub(crate) fn owner_for(&self, family: &str, lock: &str) -> Result<&OwnerId> {
        let refuse = |reason| Err(Error::InvalidHandOver { reason });
        if *self.lock != *lock {
            return refuse(format!(
                "it is for lock {:?}, not for {lock:?}; adopt it with the lock that it is for",
                self.lock
            ));
        }
        if *self.family != *family {
            return refuse(format!(
                "it is for lock {lock:?} of the kind {:?}, not {family:?}; use that kind",
                self.family
            ));
        }
        Ok(&self.owner)
    }

    /// Returns the text for the other process: visible ASCII, about twice the length of the lock's
    /// name plus 150 characters.
    #[must_use = "it only creates the text"]
    pub fn to_text(&self) -> String {
        let mut text = VERSION.to_owned();
        for byte in format!("{}\n{}\n{}", self.family, self.owner.as_str(), self.lock).bytes() {
            let _ = fmt::Write::write_fmt(&mut text, format_args!("{byte:02x}"));
        }
        text
    }

    /// Parses the text from another process.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidHandOver`] if it is not a hand-over. The message does not quote it.
    pub fn from_text(text: &str) -> Result<Self> {
        let read = || {
            let digits = text.strip_prefix(VERSION)?.as_bytes();
            let digit = |digit: u8| char::from(digit).to_digit(16);
            let byte = |pair: &[u8]| match *pair {
                [high, low] => u8::try_from(digit(high)? * 16 + digit(low)?).ok(),
                _ => None,
            };
            let text =
                String::from_utf8(digits.chunks(2).map(byte).collect::<Option<_>>()?).ok()?;
            // The lock comes last, since its name may contain line breaks.
            let mut parts = text.splitn(3, '\n');
            let (family, owner, lock) = (parts.next()?, parts.next()?, parts.next()?);
            // a text with a real owner is rejected: the name of a real owner is not secret
            let owner = owner.parse().ok().filter(OwnerId::is_placeholder)?;
            Some(Self {
                family: family.into(),
                lock: lock.into(),
                owner,
            })
        };
        read().ok_or_else(|| Error::InvalidHandOver {
            reason: "the text was not made by HandOver::to_text; pass it on unchanged".to_owned(),
        })
    }
}

/// Omits the owner: that is the secret by which the lock is adopted.
impl fmt::Debug for HandOver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HandOver")
            .field("lock", &self.lock)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_read_as_it_was_made() {
        for name in ["order:7", "zwei Zeilen\nund ein ß", ""] {
            let made = HandOver::new("reentrant", &name.into(), OwnerId::placeholder());
            let text = made.to_text();
            assert!(text.bytes().all(|byte| byte.is_ascii_graphic()), "{text}");
            assert_eq!(HandOver::from_text(&text).unwrap(), made);
            assert!(made.owner_for("reentrant", name).is_ok());
        }
    }

    #[test]
    fn what_is_no_hand_over_is_refused() {
        let text = HandOver::new("reentrant", &"order:7".into(), OwnerId::placeholder()).to_text();
        let (cut, longer) = (&text[..text.len() - 1], format!("{text}g0"));
        let holder: OwnerId = "0a1b2c3d-1111-4222-8333-444455556666:42".parse().unwrap();
        let of_a_holder = HandOver::new("reentrant", &"order:7".into(), holder).to_text();
        for wrong in [
            &of_a_holder,
            "",
            "nl1.",
            "nl2.00",
            cut,
            &longer,
            "nl1.ff",
            "nl1.0a0a",
            &text.replace("nl1", "NL1"),
        ] {
            assert!(
                matches!(
                    HandOver::from_text(wrong),
                    Err(Error::InvalidHandOver { .. })
                ),
                "{wrong}"
            );
        }
    }

    #[test]
    fn it_does_not_print_what_it_is_adopted_with() {
        let hand_over = HandOver::new("reentrant", &"order:7".into(), OwnerId::placeholder());
        let (printed, secret) = (
            format!("{hand_over:?}"),
            hand_over.owner.as_str()[..36].to_owned(),
        );
        assert!(
            printed.contains("order:7") && !printed.contains(&secret),
            "{printed}"
        );
    }

    #[test]
    fn another_lock_or_kind_is_refused() {
        let hand_over = HandOver::new("read", &"order:7".into(), OwnerId::placeholder());
        let message = |family, lock| hand_over.owner_for(family, lock).unwrap_err().to_string();
        assert!(message("read", "order:8").contains("\"order:7\""));
        assert!(message("write", "order:7").contains("\"read\""));
    }
}
