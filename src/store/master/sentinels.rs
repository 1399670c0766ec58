//! One connection to each sentinel. The client polls it for the master's address, and the sentinel
//! reports when there is another master.
//!
//! The client polls all sentinels, because they learn of a failover one after the other. It polls
//! only for the address: until the failover is over, everything else that a sentinel says about its
//! master is about the old one.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};

use nestlock_wire::{
    CloseOnDrop, Connection, Dialer, Failure, Login, NotConnected, Pace, Push, Request, Server,
    Sink, Until, Value, clock, jitter, log,
};
use tokio::{sync::watch, task::AbortHandle, time::sleep};

use crate::{
    error::{StoreError, StoreErrorKind},
    store::{
        connect_options::ConnectOptions,
        endpoint::Sentinels,
        master::{
            reign::Reign,
            role::{nonsense, reply_timeout},
            vote::{self, SentinelReply, Verdict, Voter},
        },
    },
};

/// The poll intervals: while the master is away, and otherwise. A reply also proves that the
/// connection works.
const QUESTIONS: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(5));
/// A connection that ends sooner is no success: the next attempt waits, longer each time, up to the
/// second of these.
const STEADY: Duration = Duration::from_secs(1);
const AFTER_SHORT_ONES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(2));
/// The channel on which a sentinel reports another master.
const SWITCH_MASTER: &str = "+switch-master";

/// The connections to all sentinels, and their replies.
pub(super) struct Watch {
    board: Arc<Board>,
    tasks: Vec<AbortHandle>,
}

struct Board {
    service: String,
    voters: Mutex<Vec<Voter>>,
    /// Counts the rounds; each is one poll of all sentinels.
    rounds: watch::Sender<u64>,
    /// Changes with every reply and every failure.
    news: watch::Sender<()>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.close();
    }
}

impl Watch {
    /// Connects to the sentinels, and stays connected. Must run on the client's own runtime.
    pub(super) fn start(dials: &ConnectOptions, sentinels: &Sentinels, reign: &Arc<Reign>) -> Self {
        let heard = Arc::new(Board {
            service: sentinels.service.clone(),
            voters: Mutex::new(sentinels.at.iter().cloned().map(Voter::new).collect()),
            rounds: watch::Sender::new(1),
            news: watch::Sender::new(()),
        });
        let rings = Arc::clone(&heard);
        let sink: Sink = Arc::new(move |heard| rings.on_push(heard));
        let login = sentinels
            .login
            .as_ref()
            .or(dials.config.sentinel_login.as_ref());
        let server = &dials.endpoint.server;
        let servers_has_one = server.credentials.is_some() || server.login != Login::default();
        let watch = |(number, at): (usize, &Server)| {
            let none = Login::default();
            let dial = dial(dials, at, Some(login.unwrap_or(&none)), &sink);
            let as_server =
                (login.is_none() && servers_has_one).then(|| self::dial(dials, at, None, &sink));
            let sentinel = Sentinel {
                number,
                dial,
                as_server,
                board: Arc::clone(&heard),
                reign: Arc::downgrade(reign),
            };
            dials.own.spawn(sentinel.watch()).abort_handle()
        };
        let tasks = sentinels.at.iter().enumerate().map(watch).collect();
        Self {
            board: heard,
            tasks,
        }
    }

    /// Returns the sentinels, and whether they reply.
    pub(super) fn sentinels(&self) -> Vec<(Server, bool)> {
        self.board.voters().iter().map(Voter::answers).collect()
    }

    pub(super) fn close(&self) {
        for task in &self.tasks {
            task.abort();
        }
        // wakes callers of `find`: no more replies will come
        for voter in self.board.voters().iter_mut() {
            voter.fails(
                Instant::now(),
                StoreError::new(StoreErrorKind::Unavailable, false, "the client was closed"),
            );
        }
        self.board.news.send_replace(());
    }

    /// Polls all sentinels, and returns the master that most of them name now.
    pub(super) async fn find(&self) -> Result<Server, NotConnected> {
        let mut news = self.board.news.subscribe();
        let round = self.board.start_round();
        loop {
            news.mark_unchanged();
            match self.board.verdict(round) {
                Verdict::Master(at) => return Ok(at),
                Verdict::Open => {}
                Verdict::NoMaster => {
                    let error = vote::no_master_error(&self.board.voters(), &self.board.service);
                    // keeps the back-off short: the sentinels are connected anyway
                    return Err(NotConnected {
                        error,
                        nobody_listens: true,
                    });
                }
            }
            // cannot fail: this struct owns the sender
            let _ = news.changed().await;
        }
    }
}

impl Board {
    fn voters(&self) -> MutexGuard<'_, Vec<Voter>> {
        self.voters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn verdict(&self, round: u64) -> Verdict {
        vote::verdict(&self.voters(), round, Instant::now())
    }

    /// Polls all sentinels; returns the number of the round.
    fn start_round(&self) -> u64 {
        self.rounds.send_modify(|round| *round += 1);
        *self.rounds.borrow()
    }

    fn on_push(&self, heard: Push<'_>) {
        let is_about_it = |text: &[u8]| {
            text.strip_prefix(self.service.as_bytes())
                .is_some_and(|rest| rest.first() == Some(&b' '))
        };
        match heard {
            Push::Message {
                channel: SWITCH_MASTER,
                text,
            } if is_about_it(text) => _ = self.start_round(),
            Push::Missed => _ = self.start_round(),
            Push::Message { .. } | Push::Dropped { .. } => {}
        }
    }
}

/// Returns the dialer for a sentinel. Without `login`, it uses that of the servers.
fn dial(dials: &ConnectOptions, at: &Server, login: Option<&Login>, sink: &Sink) -> Dialer {
    let mut dial = dials.for_scripts().at(at);
    dial.settings.driver = None;
    dial.settings.sink = Some(Arc::clone(sink));
    dial.settings.server.database = None;
    if let Some(login) = login {
        dial.settings.server.login = login.clone();
        dial.settings.server.credentials = None;
    }
    dial
}

type RoundCounter = watch::Receiver<u64>;

/// A connection to a sentinel that has replied.
struct Greeted {
    ends: CloseOnDrop,
    /// Whether the sentinel reports another master. Otherwise it must be polled.
    tells: bool,
}

/// One sentinel, and its connection.
struct Sentinel {
    number: usize,
    /// Uses the sentinels' login, or none. A sentinel that needs none must be reached even if the
    /// servers' login is from a provider that fails: it may know of another master.
    dial: Dialer,
    /// The same dialer with the servers' login, for a sentinel that refuses a client without one, or
    /// does not let it subscribe.
    as_server: Option<Dialer>,
    board: Arc<Board>,
    reign: Weak<Reign>,
}

impl Sentinel {
    async fn watch(self) {
        let (pace, mut before, mut pause) = (Pace::new(), None, AFTER_SHORT_ONES.0);
        let mut rounds = self.board.rounds.subscribe();
        loop {
            let connected = pace
                .attempt_connect(before, self.connect(&mut rounds))
                .await;
            let since = Instant::now();
            let (NotConnected { error, .. }, was_connected) = match connected {
                Ok(ends) => {
                    before = Some(since);
                    let failure = self.poll_over(&ends.connection, &mut rounds).await;
                    (failure.into(), true)
                }
                Err(error) => (error, false),
            };
            log::later!(DEBUG, sentinel = self.number, error = error; "a sentinel does not reply");
            self.board.voters()[self.number].fails(Instant::now(), error);
            self.count();
            if since.elapsed() >= STEADY {
                pause = AFTER_SHORT_ONES.0;
            } else if was_connected {
                sleep(jitter(pause, 0.2)).await;
                pause = AFTER_SHORT_ONES.1.min(pause * 2);
            }
        }
    }

    /// Connects, and polls for the first time. The first poll is part of the attempt, so that the
    /// back-off also covers a sentinel that connects and does not reply.
    async fn connect(&self, rounds: &mut RoundCounter) -> Result<CloseOnDrop, NotConnected> {
        let first = self.connect_by(&self.dial, rounds).await;
        match (first, &self.as_server) {
            (Ok(bare), Some(dial)) if !bare.tells => self.log_in(bare.ends, dial, rounds).await,
            // only what is refused may get the login: any other failure is no reason to send it
            (Err(failed), Some(dial)) if is_refused(&failed) => {
                Ok(self.connect_by(dial, rounds).await?.ends)
            }
            (first, _) => first.map(|greeted| greeted.ends),
        }
    }

    /// Connects once more, with a login, and returns that connection if the sentinel reports another
    /// master over it. Otherwise returns the one without a login, and polls over that one in the
    /// meantime: the function for credentials may hang.
    async fn log_in(
        &self,
        bare: CloseOnDrop,
        dial: &Dialer,
        rounds: &mut RoundCounter,
    ) -> Result<CloseOnDrop, NotConnected> {
        let mut seen = rounds.clone();
        let with_login = self.connect_by(dial, &mut seen);
        tokio::pin!(with_login);
        tokio::select! {
            greeted = &mut with_login => match greeted {
                Ok(greeted) if greeted.tells => Ok(greeted.ends),
                _ => {
                    // the caller's next poll is a whole interval from now
                    self.ask(&bare.connection, rounds).await?;
                    Ok(bare)
                }
            },
            _ = self.poll_over(&bare.connection, rounds) => Ok(with_login.await?.ends),
        }
    }

    async fn connect_by(
        &self,
        dial: &Dialer,
        rounds: &mut RoundCounter,
    ) -> Result<Greeted, NotConnected> {
        let limit = reply_timeout(dial);
        // boxed: the futures of both dialers would each have room for it
        let attempt = Box::pin(async {
            match self.greet(dial, true, rounds).await {
                // fred's client takes a refused subscription for the reply to the poll, or ends
                Err(failed) if dial.wire.is_fred() && is_answered(&failed) => {
                    self.greet(dial, false, rounds).await
                }
                greeted => greeted,
            }
        });
        dial.in_time(limit, attempt).await
    }

    /// Opens a connection, subscribes to reports of another master if `listens`, and polls.
    async fn greet(
        &self,
        dial: &Dialer,
        listens: bool,
        rounds: &mut RoundCounter,
    ) -> Result<Greeted, NotConnected> {
        let ends = CloseOnDrop::new(dial.open(reply_timeout(dial)).await?);
        // if the user may not subscribe, polling alone must suffice
        let tells = listens
            && match ends.connection.listen(SWITCH_MASTER, self.until()).await {
                Ok(()) => true,
                Err(Failure::Refused(_)) if !dial.wire.is_fred() => false,
                Err(failure) => return Err(failure.into()),
            };
        self.ask(&ends.connection, rounds).await?;
        Ok(Greeted { ends, tells })
    }

    fn until(&self) -> Until {
        Until::new(clock::Instant::now(), reply_timeout(&self.dial))
    }

    /// Polls for the address, and records the reply.
    async fn ask(&self, connection: &Connection, rounds: &mut RoundCounter) -> Result<(), Failure> {
        let round = *rounds.borrow_and_update();
        let words = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", &self.board.service];
        let answer = connection
            .call(Request::Words(&words), self.until())
            .await?;
        let named = named(&answer)?;
        self.board.voters()[self.number].record_reply(round, named);
        self.count();
        Ok(())
    }

    /// Polls until the connection fails; returns why it did.
    async fn poll_over(&self, connection: &Connection, rounds: &mut RoundCounter) -> Failure {
        loop {
            let is_away = self.reign.upgrade().is_some_and(|reign| reign.is_away());
            let pause = if is_away { QUESTIONS.0 } else { QUESTIONS.1 };
            tokio::select! {
                () = connection.ended() => return Failure::Ended,
                _ = rounds.changed() => {}
                () = sleep(pause) => {}
            }
            if let Err(failure) = self.ask(connection, rounds).await {
                return failure;
            }
        }
    }

    /// Counts the votes. If most sentinels name another master by now, switches to it.
    fn count(&self) {
        // round 0: the last reply of each sentinel counts, from any round
        if let Verdict::Master(at) = self.board.verdict(0)
            && let Some(reign) = self.reign.upgrade()
        {
            reign.is_now(&at);
        }
        self.board.news.send_replace(());
    }
}

/// Returns whether the sentinel has let this user in before the connection failed, as far as the
/// failure says.
fn is_answered(failed: &NotConnected) -> bool {
    use StoreErrorKind::{Auth, Timeout};
    !failed.nobody_listens && !matches!(failed.error.kind(), Auth | Timeout)
}

/// Returns whether the sentinel refuses this user.
fn is_refused(failed: &NotConnected) -> bool {
    use StoreErrorKind::{Auth, NoPermission};
    matches!(failed.error.kind(), Auth | NoPermission)
}

/// Parses a reply.
fn named(answer: &Value) -> Result<SentinelReply, Failure> {
    match answer {
        Value::Null => return Ok(SentinelReply::Unknown),
        Value::Array(parts) => {
            if let [host, port] = parts.as_slice()
                && let (Some(host), Some(port)) = (host.as_str(), port.as_number())
                && let Ok(port) = u16::try_from(port)
                && !host.is_empty()
            {
                return Ok(SentinelReply::Master(Server::new(host, port)));
            }
        }
        _ => {}
    }
    Err(nonsense("SENTINEL GET-MASTER-ADDR-BY-NAME"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_about_the_service_is_a_question_to_all() {
        let board = Board {
            service: "my".into(),
            voters: Mutex::default(),
            rounds: watch::Sender::new(1),
            news: watch::Sender::new(()),
        };
        let mut round = 1;
        for (channel, text, asks) in [
            (SWITCH_MASTER, "my 127.0.0.1 1 127.0.0.1 2", true),
            (SWITCH_MASTER, "mymaster 127.0.0.1 1 127.0.0.1 2", false),
            ("+sdown", "my 127.0.0.1 1", false),
            (SWITCH_MASTER, "my a 1 b 2", true),
        ] {
            board.on_push(Push::Message {
                channel,
                text: text.as_bytes(),
            });
            round += u64::from(asks);
            assert_eq!(*board.rounds.borrow(), round, "{channel} {text}");
        }
        board.on_push(Push::Missed);
        assert_eq!(*board.rounds.borrow(), round + 1);
    }

    #[test]
    fn an_address_is_a_host_and_a_port() {
        let array =
            |words: &[&str]| Value::Array(words.iter().map(|word| Value::text(word)).collect());
        assert_eq!(named(&Value::Null), Ok(SentinelReply::Unknown));
        assert_eq!(
            named(&array(&["::1", "6379"])),
            Ok(SentinelReply::Master(Server::new("::1", 6379)))
        );
        for odd in [
            array(&["a"]),
            array(&["a", "b"]),
            array(&["", "1"]),
            array(&["a", "65536"]),
            array(&["a", "1", "2"]),
        ] {
            assert!(named(&odd).is_err(), "{odd:?}");
        }
        assert!(named(&Value::Integer(1)).is_err());
    }
}
