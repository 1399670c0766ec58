//! Converts texts into owners, and checks them.

use std::str::FromStr;

use uuid::Uuid;

use crate::{
    error::Error,
    owner::{ClientId, OwnerId, length},
};

/// The longest name that [`LockClient::owner`](crate::LockClient::owner) accepts, in bytes.
const MAX_NAME: usize = 128;
/// The longest value that the user may choose as an owner, in bytes.
const MAX_VALUE: usize = 1024;

impl OwnerId {
    pub(crate) fn named(client: &ClientId, name: &str) -> Result<Self, Error> {
        let refuse = |reason| {
            Err(Error::InvalidOwner {
                owner: name.to_owned(),
                reason,
            })
        };
        if name.is_empty() {
            return refuse("it is empty; give it at least one character");
        }
        if name.len() > MAX_NAME {
            return refuse("it is longer than 128 bytes; use a shorter one");
        }
        if !name
            .bytes()
            .all(|byte| byte.is_ascii_graphic() && byte != b'.')
        {
            return refuse("use visible ASCII characters without '.'");
        }
        if name.ends_with(":write") {
            return refuse("it ends with ':write', which marks a writer; use another name");
        }
        Ok(Self::new(client, format_args!("x/{name}")))
    }

    /// Returns the owner of a record whose owners are arbitrary texts (the value of a string lock):
    /// to release or extend another process's hold with [`Lock::release`](crate::Lock::release) and
    /// [`Lock::extend`](crate::Lock::extend). To acquire under such a text use
    /// [`AcquireOptions::value`](crate::AcquireOptions::value).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidOwner`] if it is empty or longer than 1024 bytes.
    pub fn from_value(value: impl AsRef<str>) -> Result<Self, Error> {
        let value = value.as_ref();
        let owner = Self::recorded(value);
        let refuse = |reason| {
            Err(Error::InvalidOwner {
                owner: value.to_owned(),
                reason,
            })
        };
        if value.is_empty() {
            return refuse("it is empty; give it at least one character");
        }
        if owner.is_value && value.len() > MAX_VALUE {
            return refuse("it is longer than 1024 bytes; use a shorter one");
        }
        Ok(owner)
    }
}

/// Parses an owner that another process printed, to release or extend its hold.
impl FromStr for OwnerId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let refuse = |reason| {
            Err(Error::InvalidOwner {
                owner: text.to_owned(),
                reason,
            })
        };
        let Some((client, task)) = text.split_once(':') else {
            return refuse("an owner reads <client uuid>:<task>");
        };
        if client.len() != 36 || Uuid::try_parse(client).is_err() || task.is_empty() {
            return refuse("an owner reads <client uuid>:<task>");
        }
        // permits add a space and a number to the name of an owner that has several
        if task.contains(char::is_whitespace) {
            return refuse("an owner reads <client uuid>:<task>, without spaces");
        }
        let (base, _) = task.split_once('.').unwrap_or((task, ""));
        let base = length(client) + 1 + length(base);
        Ok(Self {
            text: text.into(),
            base,
            is_value: false,
            is_exact: true,
            turn: 0,
        })
    }
}
