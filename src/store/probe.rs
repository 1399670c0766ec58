//! Checks, when a client connects, that a server runs scripts.

use std::time::Duration;

use futures_util::future::join;
use nestlock_wire::{Connection, Request, Until, clock::Instant};

use crate::{error::StoreError, options::Config};

/// A script that does nothing, and its digest.
const NOTHING: (&str, &str) = ("return 1", "e0e1f9fabfc9d4800c877a703b823ac0578ff8db");

/// How long the replies may take. A server that is about to fail over holds scripts back, and a
/// connect must not wait for that.
const ANSWERS: Duration = Duration::from_secs(1);

/// Runs a script that does nothing, by its text and by its digest. Fails if the server lacks `EVAL`
/// or `EVALSHA`, or if the user may not use them. Ignores all other errors, which may be transient.
pub(super) async fn runs_scripts(
    connection: &Connection,
    config: &Config,
) -> Result<(), StoreError> {
    if !config.tuning.tries_scripts {
        return Ok(());
    }
    let limit = ANSWERS.min(config.connect_timeout / 4);
    let ask = async |words: [&str; 3]| {
        let answer = connection
            .call(Request::Words(&words), Until::new(Instant::now(), limit))
            .await;
        answer.map(drop).map_err(StoreError::from)
    };
    let (text, digest) = join(
        ask(["EVAL", NOTHING.0, "0"]),
        ask(["EVALSHA", NOTHING.1, "0"]),
    )
    .await;
    let is_denied = |error: &StoreError| error.kind().is_denied();
    text.err()
        .into_iter()
        .chain(digest.err())
        .find(is_denied)
        .map_or(Ok(()), Err)
}
