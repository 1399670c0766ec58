//! Keeps a link connected.

use std::{
    sync::{Arc, PoisonError},
    time::{Duration, Instant},
};

use tokio::time::{sleep, timeout};

use crate::{
    connection::Connection,
    error::StoreErrorKind,
    failure::NotConnected,
    link::{HEARTBEAT, Link, LinkPurpose, LinkState},
    log,
    wake::catch_waker_panic,
};

/// Heartbeats without a reply before the connection is given up.
const MISSED_HEARTBEATS: u32 = 2;
/// How long to drain in-flight replies when replacing a healthy connection.
const DRAIN: Duration = Duration::from_secs(1);

impl Link {
    /// Connects whenever there is no connection.
    pub(crate) async fn supervise(self: Arc<Self>, mut first: Option<Connection>) {
        let (mut searches, mut given_up) = (self.pace.searches(), self.given_up.subscribe());
        let mut connected = None;
        loop {
            let connection = match first.take() {
                Some(connection) => connection,
                None => match self.reconnect(connected).await {
                    Some(connection) => {
                        self.set_up(&connection);
                        if connected.is_some() {
                            (self.dial.reconnected)(self.name());
                        }
                        connection
                    }
                    None => return,
                },
            };
            connected = Some(Instant::now());
            searches.mark_unchanged();
            let epoch = self.epoch();
            log::later!(DEBUG, epoch = epoch; "connected");
            let works = tokio::select! {
                () = connection.ended() => false,
                _ = given_up.wait_for(|given_up| *given_up >= epoch) => false,
                _ = searches.changed() => true,
            };
            self.mark_reconnecting();
            if works {
                self.drain().await;
            }
            connection.end();
        }
    }

    /// Connects as soon as the server accepts. Returns `None` if the link was closed.
    async fn reconnect(&self, before: Option<Instant>) -> Option<Connection> {
        let lost = Instant::now();
        let mut limit = self.dial.first_limit;
        loop {
            if self.is_closed() {
                self.set(LinkState::Down);
                return None;
            }
            match self
                .pace
                .attempt_connect(before, self.dial.connect(limit))
                .await
            {
                Ok(connection) if self.is_closed() => connection.end(),
                Ok(connection) => return Some(connection),
                Err(NotConnected {
                    error,
                    nobody_listens,
                }) => {
                    if error.kind() == StoreErrorKind::Timeout {
                        // the server may be slow, not hung
                        limit = (2 * limit).min(self.dial.settings.connect_timeout);
                    }
                    *self.refused.lock().unwrap_or_else(PoisonError::into_inner) =
                        Some(error.said());
                    // otherwise the new connection may just have broken again
                    if nobody_listens || lost.elapsed() > self.patience {
                        self.set(LinkState::Down);
                    }
                    log::later!(DEBUG, error = error; "cannot connect");
                }
            }
        }
    }

    /// Waits up to [`DRAIN`] for the replies in flight, except to blocking reads.
    async fn drain(&self) {
        let answers = async {
            // a caller that has just seen the link up may send its request after the first PING
            self.echo().await?;
            self.echo().await
        };
        if self.carries != LinkPurpose::BlockingReads
            && !matches!(timeout(DRAIN, answers).await, Ok(Ok(())))
        {
            log::later!(DEBUG, epoch = self.epoch(); "the old connection does not answer any more");
        }
    }

    /// Sends a PING over a silent connection, and gives the connection up if replies stay away.
    pub(crate) async fn beat(self: Arc<Self>) {
        let mut missed = 0;
        while !self.is_closed() {
            sleep(HEARTBEAT).await;
            if self
                .current()
                .is_none_or(|connection| connection.had_reply())
                || !self.is_up()
            {
                missed = 0;
                continue;
            }
            match self.barrier().await {
                Ok(()) => missed = 0,
                Err(error) if error.kind() == StoreErrorKind::Timeout => missed += 1,
                Err(_) => {}
            }
            if missed >= MISSED_HEARTBEATS {
                missed = 0;
                log::later!(WARN, missed = MISSED_HEARTBEATS; "no answer to heartbeats; reconnecting");
                self.reset().await;
            }
        }
    }

    /// Returns the name of the link in metrics.
    fn name(&self) -> &'static str {
        match self.carries {
            LinkPurpose::BlockingReads => "lists",
            LinkPurpose::Requests if self.dial.settings.sink.is_some() => "pubsub",
            LinkPurpose::Requests => "script",
        }
    }

    /// Marks the connection as unusable. Another one may be up in a moment.
    pub(crate) fn mark_reconnecting(&self) {
        let blink = |state: &mut LinkState| {
            *state == LinkState::Up
                && std::mem::replace(state, LinkState::Reconnecting) == LinkState::Up
        };
        catch_waker_panic(|| _ = self.state.send_if_modified(blink));
    }

    /// Lets requests use the connection that was just made.
    pub(crate) fn set_up(&self, connection: &Connection) {
        let epoch = self.dial.epochs.next();
        *self
            .connection
            .write()
            .unwrap_or_else(PoisonError::into_inner) = Some((epoch, connection.clone()));
        self.set(LinkState::Up);
        self.refused
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        catch_waker_panic(|| _ = self.ready.send_replace(epoch));
        if self.carries == LinkPurpose::Requests && self.dial.settings.sink.is_none() {
            catch_waker_panic(|| _ = self.dial.epochs.of_scripts.send_replace(epoch));
        }
    }
}
