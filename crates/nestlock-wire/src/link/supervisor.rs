//! Keeps a link connected.

use std::{
    sync::{Arc, PoisonError, Weak},
    time::{Duration, Instant},
};

use tokio::{
    sync::watch,
    time::{sleep, timeout},
};

use crate::{
    clock,
    connection::Connection,
    error::StoreErrorKind,
    failure::NotConnected,
    link::{HEARTBEAT, Link, LinkPurpose, LinkState, refresh::keep_logged_in},
    log,
    wake::catch_waker_panic,
};

/// Heartbeats without a reply before the connection is given up.
const MISSED_HEARTBEATS: u32 = 2;
/// How long to drain in-flight replies when replacing a healthy connection.
const DRAIN: Duration = Duration::from_secs(1);

/// The supervisor's reference to its link. Closes the link when the supervisor ends, even before
/// its first poll: the link was closed or dropped, or the runtime of its connections has ended. No
/// request may wait for a connection then: a timer of that runtime would panic.
struct Supervised(Weak<Link>);

impl Drop for Supervised {
    fn drop(&mut self) {
        if let Some(link) = self.0.upgrade()
            && !link.mark_closed()
        {
            link.refuse("the runtime of its connections has ended".into());
        }
    }
}

impl Link {
    /// Spawns the tasks that keep the link connected, and find out when its peer is gone. They do
    /// not keep the link itself alive.
    pub(super) fn keep_connected(self: &Arc<Self>, first: Option<Connection>) {
        let own = &self.dial.settings.own;
        let supervised = Supervised(Arc::downgrade(self));
        own.spawn(Self::supervise(supervised, first));
        if self.carries != LinkPurpose::BlockingReads {
            own.spawn(Self::beat(Arc::downgrade(self)));
        }
    }

    /// Connects whenever there is no connection, until the link is closed or dropped.
    async fn supervise(supervised: Supervised, mut first: Option<Connection>) {
        let link = &supervised.0;
        let Some((mut searches, mut given_up, blocks)) = link.upgrade().map(|link| {
            let blocks = link.carries == LinkPurpose::BlockingReads;
            (link.pace.searches(), link.given_up.subscribe(), blocks)
        }) else {
            return;
        };
        let mut connected = None;
        loop {
            let connection = match first.take() {
                Some(connection) => connection,
                None => match Self::reconnect(link, connected).await {
                    Some(connection) => connection,
                    None => return,
                },
            };
            connected = Some(Instant::now());
            // this connection has satisfied all earlier searches
            searches.mark_unchanged();
            let Some(epoch) = link.upgrade().map(|link| link.epoch()) else {
                return;
            };
            log::later!(DEBUG, epoch = epoch; "connected");
            // a link that is dropped ends its connection
            let works = tokio::select! {
                () = connection.ended() => false,
                _ = given_up.wait_for(|given_up| *given_up >= epoch) => false,
                _ = searches.changed() => true,
                // a blocked connection replies to no AUTH; the server closes it at the latest
                never = keep_logged_in(&connection), if !blocks => match never {},
            };
            if let Some(link) = link.upgrade() {
                link.mark_reconnecting();
                if works {
                    link.drain().await;
                }
            }
            connection.end();
        }
    }

    /// Connects as soon as the server accepts. Returns `None` if the link was closed or dropped:
    /// its turn then passes to the other links at once.
    async fn reconnect(link: &Weak<Self>, before: Option<Instant>) -> Option<Connection> {
        let lost = Instant::now();
        let (dial, pace, mut state) = {
            let link = link.upgrade()?;
            (
                link.dial.clone(),
                Arc::clone(&link.pace),
                link.state.subscribe(),
            )
        };
        let mut limit = dial.first_limit;
        loop {
            let attempt = tokio::select! {
                biased;
                () = Self::gone(link, &mut state) => return None,
                attempt = pace.attempt_connect(before, dial.connect(limit)) => attempt,
            };
            let link = link.upgrade()?;
            match attempt {
                Ok(connection) => {
                    link.set_up(&connection);
                    // checked after `set_up`: anything that closes the link later ends this
                    // connection
                    if link.is_closed() {
                        link.end();
                        return None;
                    }
                    if before.is_some() {
                        catch_waker_panic(|| (dial.reconnected)(link.name()));
                    }
                    return Some(connection);
                }
                Err(NotConnected {
                    error,
                    nobody_listens,
                }) => {
                    if error.kind() == StoreErrorKind::Timeout {
                        // the server may be slow, not hung
                        limit = limit.saturating_mul(2).min(dial.settings.connect_timeout);
                    }
                    link.refuse(error.said());
                    // otherwise the new connection may just have broken again
                    if nobody_listens || lost.elapsed() > link.patience {
                        link.set(LinkState::Down);
                    }
                    log::later!(DEBUG, error = error; "cannot connect");
                }
            }
        }
    }

    /// Waits until the link is closed or dropped.
    async fn gone(link: &Weak<Self>, state: &mut watch::Receiver<LinkState>) {
        let is_there = || link.upgrade().is_some_and(|link| !link.is_closed());
        while is_there() && state.changed().await.is_ok() {}
    }

    fn refuse(&self, why: String) {
        *self.refused.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
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
            log::later!(DEBUG, epoch = self.epoch(); "the old connection does not reply any more");
        }
    }

    /// Sends a PING over a silent connection, and gives the connection up if no replies arrive.
    async fn beat(weak: Weak<Self>) {
        let mut missed = 0;
        loop {
            sleep(HEARTBEAT).await;
            let Some(link) = weak.upgrade().filter(|link| !link.is_closed()) else {
                return;
            };
            let Some(connection) = link
                .current()
                .filter(|connection| !connection.had_reply() && link.is_up())
            else {
                missed = 0;
                continue;
            };
            let sent = clock::Instant::now();
            let (until, is_held_up) = (link.until(sent), link.wait_requests.hold_up());
            // otherwise this task would keep a dropped link alive while it waits
            drop(link);
            let answer = connection.echo(until).await;
            let Some(link) = weak.upgrade() else {
                return;
            };
            match link.echoed(answer, sent, is_held_up) {
                Ok(()) => missed = 0,
                Err(error) if error.kind() == StoreErrorKind::Timeout => missed += 1,
                Err(_) => {}
            }
            if missed >= MISSED_HEARTBEATS {
                missed = 0;
                log::later!(WARN, missed = MISSED_HEARTBEATS; "no reply to heartbeats; reconnecting");
                link.give_up();
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
