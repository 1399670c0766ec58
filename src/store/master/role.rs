//! What a server says about its role.

use std::{fmt, time::Duration};

use nestlock_wire::{
    Connection, Dialer, Failure, NotConnected, Request, Server, Until, Value, clock,
};

use crate::error::StoreError;

/// How long a sentinel or a listed server has to reply; at most half of the connect timeout.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);

/// Returns how long each sentinel or server has to reply.
pub(crate) fn reply_timeout(dial: &Dialer) -> Duration {
    REPLY_TIMEOUT.min(dial.settings.connect_timeout / 2)
}

/// A server's role, as it says itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Master,
    Replica,
    Sentinel,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Master => "a master",
            Self::Replica => "a replica",
            Self::Sentinel => "a sentinel",
        })
    }
}

pub(crate) async fn role(connection: &Connection, limit: Duration) -> Result<Role, Failure> {
    let until = Until::new(clock::Instant::now(), limit);
    let answer = connection.call(Request::Words(&["ROLE"]), until).await?;
    let Value::Array(parts) = &answer else {
        return Err(nonsense("ROLE"));
    };
    match parts.first().and_then(Value::as_str) {
        Some("master") => Ok(Role::Master),
        Some("slave") => Ok(Role::Replica),
        Some("sentinel") => Ok(Role::Sentinel),
        _ => Err(nonsense("ROLE")),
    }
}

pub(crate) fn nonsense(request: &str) -> Failure {
    Failure::Nonsense(format!("unexpected reply to {request}"))
}

/// Returns the same failure, with the server in its text. Such a connection has carried only reads,
/// so nothing can have been executed.
pub(crate) fn failed(at: &Server, failure: &NotConnected) -> NotConnected {
    let why = format!("{at}: {}", words(&failure.error));
    NotConnected {
        error: StoreError::new(failure.error.kind(), false, why).before_any_request(),
        nobody_listens: failure.nobody_listens,
    }
}

/// Returns the error's text without its kind.
pub(crate) fn words(error: &StoreError) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}
