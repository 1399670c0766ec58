//! Keeps a connection logged in: replaces its credentials before they expire.

use std::{convert::Infallible, future::pending, time::Duration};

use tokio::time::{sleep, timeout};

use crate::{
    clock::Instant,
    connection::Connection,
    expiring::{Expiring, provided},
    failure::NotConnected,
    log,
    request::Request,
    until::Until,
};

/// How long to wait before the next try, if credentials could not be refreshed: a tenth of their
/// time, within these limits.
const RETRY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(10));

/// Replaces the credentials of a connection again and again, if they expire. Never completes.
pub(super) async fn keep_logged_in(connection: &Connection) -> Infallible {
    match connection.credentials() {
        Some(credentials) => credentials.refresh(connection).await,
        None => pending().await,
    }
}

impl Expiring {
    async fn refresh(&self, connection: &Connection) -> Infallible {
        let (mut due, mut time) = (self.fetched + self.refresh_after, self.refresh_after);
        loop {
            sleep(due.saturating_duration_since(Instant::now())).await;
            let why = match timeout(self.settings.connect_timeout, self.replace(connection)).await {
                Ok(Ok(Some(next))) => {
                    (due, time) = (next.fetched + next.refresh_after, next.refresh_after);
                    continue;
                }
                // the new ones do not expire
                Ok(Ok(None)) => return pending().await,
                Ok(Err(NotConnected { error, .. })) => error.to_string(),
                Err(late) => late.to_string(),
            };
            log::later!(WARN, error = why; "cannot refresh the credentials of a connection");
            due = Instant::now() + retry(time);
        }
    }

    /// Replaces the credentials of a connection. If the server refuses the new ones, tries once
    /// more: they may have been replaced in the meantime.
    async fn replace(&self, connection: &Connection) -> Result<Option<Self>, NotConnected> {
        match self.replace_once(connection).await {
            Err(refused) if refused.is_login_refused() => self.replace_once(connection).await,
            outcome => outcome,
        }
    }

    async fn replace_once(&self, connection: &Connection) -> Result<Option<Self>, NotConnected> {
        let (login, next) = provided(&self.source, &self.settings).await?;
        if let Some(password) = &login.password {
            let user = login.user.as_deref().unwrap_or("default");
            let until = Until::new(Instant::now(), self.settings.command_timeout);
            let words = ["AUTH", user, password];
            let answer = connection.call(Request::Words(&words), until).await;
            answer.map_err(NotConnected::of_login)?;
        }
        Ok(next)
    }
}

/// Returns how long to wait after a failed refresh of credentials that live for this time.
fn retry(time: Duration) -> Duration {
    (time / 10).clamp(RETRY.0, RETRY.1)
}
