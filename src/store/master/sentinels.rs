//! A small connection to each sentinel, over which it is asked where the master is, and rings when there is another one.
//!
//! All are asked, since they hear of a failover one after the other, and each for the address: what else a sentinel says of
//! its master is of the old one until the failover is over.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, atomic::Ordering},
    time::{Duration, Instant},
};

use fred::types::config::Server;
use tokio::{
    sync::watch,
    task::AbortHandle,
    time::{sleep, timeout},
};

use super::{
    Master, limit, nonsense,
    vote::{self, Verdict, Voter, Word},
};
use crate::{
    clock,
    error::{StoreError, StoreErrorKind},
    log,
    options::Login,
    store::{
        Dials,
        endpoint::Sentinels,
        pace::Pace,
        wire::{Connection, Dial, Ends, Failure, Heard, NotConnected, Request, Sink, Until, Value},
    },
};

/// Between two questions: while the master is away, and else. The answer also tells that the connection lives.
const QUESTIONS: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(5));
/// Where a sentinel tells of another master.
const BELL: &str = "+switch-master";

/// What is heard of all sentinels.
pub(super) struct Watch {
    heard: Arc<Board>,
    tasks: Vec<AbortHandle>,
}

struct Board {
    service: String,
    voters: Mutex<Vec<Voter>>,
    /// Counts the rounds of questions.
    rounds: watch::Sender<u64>,
    /// Changes with whatever is heard.
    news: watch::Sender<()>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.close();
    }
}

impl Watch {
    /// Connects to them, and stays connected. On the client's own runtime.
    pub(super) fn start(dials: &Dials, sentinels: &Sentinels, master: &Weak<Master>) -> Self {
        let heard = Arc::new(Board {
            service: sentinels.service.clone(),
            voters: Mutex::new(sentinels.at.iter().cloned().map(Voter::new).collect()),
            rounds: watch::Sender::new(1),
            news: watch::Sender::new(()),
        });
        let rings = Arc::clone(&heard);
        let sink: Sink = Arc::new(move |heard| rings.hear(heard));
        let login = sentinels.login.as_ref().or(dials.config.sentinel_login.as_ref());
        let watch = |(number, at): (usize, &Server)| {
            let dial = dial(dials, at, login, &sink);
            // theirs, if they have one, may be the servers'
            let bare = login.is_none().then(|| self::dial(dials, at, Some(&Login::default()), &sink));
            let sentinel = Sentinel { number, dial, bare, board: Arc::clone(&heard), master: Weak::clone(master) };
            dials.own.spawn(sentinel.watch()).abort_handle()
        };
        let tasks = sentinels.at.iter().enumerate().map(watch).collect();
        Self { heard, tasks }
    }

    /// Who they are, and whether they answer.
    pub(super) fn sentinels(&self) -> Vec<(Server, bool)> {
        self.heard.voters().iter().map(Voter::answers).collect()
    }

    pub(super) fn close(&self) {
        for task in &self.tasks {
            task.abort();
        }
        // whoever waits for an answer goes on
        for voter in self.heard.voters().iter_mut() {
            voter.fails(Instant::now(), StoreError::new(StoreErrorKind::Unavailable, false, "the client has ended"));
        }
        self.heard.news.send_replace(());
    }

    /// The server that most of them name, who are asked now.
    pub(super) async fn find(&self) -> Result<Server, NotConnected> {
        let mut news = self.heard.news.subscribe();
        let round = self.heard.ask();
        loop {
            news.mark_unchanged();
            match self.heard.verdict(round) {
                Verdict::Master(at) => return Ok(at),
                Verdict::Open => {}
                Verdict::Nobody => {
                    let error = vote::why_nobody(&self.heard.voters(), &self.heard.service);
                    // nobody was asked but who is connected anyway
                    return Err(NotConnected { error, nobody_listens: true });
                }
            }
            // it is ours: there is always somebody who tells
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

    /// Asks all of them: in which round.
    fn ask(&self) -> u64 {
        self.rounds.send_modify(|round| *round += 1);
        *self.rounds.borrow()
    }

    fn hear(&self, heard: Heard<'_>) {
        let is_about_it =
            |text: &[u8]| text.strip_prefix(self.service.as_bytes()).is_some_and(|rest| rest.first() == Some(&b' '));
        match heard {
            Heard::Message { channel: BELL, text } if is_about_it(text) => _ = self.ask(),
            Heard::Missed => _ = self.ask(),
            Heard::Message { .. } | Heard::Dropped { .. } => {}
        }
    }
}

/// The way to a sentinel. Without a login of its own, it has that of the servers.
fn dial(dials: &Dials, at: &Server, login: Option<&Login>, sink: &Sink) -> Dial {
    let mut dial = Dial { driver: None, sink: Some(Arc::clone(sink)), ..dials.for_scripts().at(at) };
    dial.connect_timeout = limit(&dial);
    dial.server.database = None;
    if let Some(login) = login {
        (dial.server.username, dial.server.password) = (login.user.clone(), login.password.clone());
        #[cfg(feature = "fred-config")]
        (dial.server.credential_provider = None);
    }
    dial
}

type Rounds = watch::Receiver<u64>;

/// One of them.
struct Sentinel {
    number: usize,
    dial: Dial,
    /// The same without a login.
    bare: Option<Dial>,
    board: Arc<Board>,
    master: Weak<Master>,
}

impl Sentinel {
    async fn watch(self) {
        let (pace, mut before) = (Pace::new(), None);
        let mut rounds = self.board.rounds.subscribe();
        loop {
            let connected = pace.knock(before, self.connect(&mut rounds)).await;
            let NotConnected { error, .. } = match connected {
                Ok(ends) => {
                    before = Some(Instant::now());
                    self.ask_on(&ends.connection, &mut rounds).await.into()
                }
                Err(error) => error,
            };
            log::later!(DEBUG, sentinel = self.number, error = error; "a sentinel does not answer");
            self.board.voters()[self.number].fails(Instant::now(), error);
            self.count();
        }
    }

    /// Connects, and asks for the first time: what does not answer is asked ever less often.
    async fn connect(&self, rounds: &mut Rounds) -> Result<Ends, NotConnected> {
        let limit = self.dial.connect_timeout;
        let late = |_| Err(Failure::Late.into());
        let first = timeout(limit, self.connect_by(&self.dial, rounds)).await.unwrap_or_else(late);
        match (first, &self.bare) {
            (Err(refused), Some(bare)) if refused.error.kind() == StoreErrorKind::Auth => {
                // where they want none, nobody has told them of the servers'
                timeout(limit, self.connect_by(bare, rounds)).await.unwrap_or_else(late).map_err(|_| refused)
            }
            (first, _) => first,
        }
    }

    async fn connect_by(&self, dial: &Dial, rounds: &mut Rounds) -> Result<Ends, NotConnected> {
        let ends = Ends::new(dial.open().await?);
        // where that is not allowed, it is only asked
        match ends.connection.listen(BELL, self.until()).await {
            Ok(()) | Err(Failure::Refused(_)) => {}
            Err(failure) => return Err(failure.into()),
        }
        self.ask(&ends.connection, rounds).await?;
        Ok(ends)
    }

    fn until(&self) -> Until {
        Until::new(clock::Instant::now(), self.dial.connect_timeout)
    }

    /// Asks for the address, and takes in the answer.
    async fn ask(&self, connection: &Connection, rounds: &mut Rounds) -> Result<(), Failure> {
        let round = *rounds.borrow_and_update();
        let words = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", &self.board.service];
        let answer = connection.call(Request::Words(&words), self.until()).await?;
        let named = named(&answer)?;
        self.board.voters()[self.number].says(round, named);
        self.count();
        Ok(())
    }

    /// Asks again and again; returns why that is over.
    async fn ask_on(&self, connection: &Connection, rounds: &mut Rounds) -> Failure {
        loop {
            let is_away = self.master.upgrade().is_some_and(|master| master.is_away.load(Ordering::Acquire));
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

    /// Something was heard: if most of them name another master by now, it is that.
    fn count(&self) {
        if let Verdict::Master(at) = self.board.verdict(0)
            && let Some(master) = self.master.upgrade()
        {
            master.is_now(&at);
        }
        self.board.news.send_replace(());
    }
}

/// What an answer names.
fn named(answer: &Value) -> Result<Word, Failure> {
    match answer {
        Value::Null => return Ok(Word::Unknown),
        Value::Array(parts) => {
            if let [host, port] = parts.as_slice()
                && let (Some(host), Some(port)) = (host.as_str(), port.as_number())
                && let Ok(port) = u16::try_from(port)
                && !host.is_empty()
            {
                return Ok(Word::Master(Server::new(host, port)));
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
            (BELL, "my 127.0.0.1 1 127.0.0.1 2", true),
            (BELL, "mymaster 127.0.0.1 1 127.0.0.1 2", false),
            ("+sdown", "my 127.0.0.1 1", false),
            (BELL, "my a 1 b 2", true),
        ] {
            board.hear(Heard::Message { channel, text: text.as_bytes() });
            round += u64::from(asks);
            assert_eq!(*board.rounds.borrow(), round, "{channel} {text}");
        }
        board.hear(Heard::Missed);
        assert_eq!(*board.rounds.borrow(), round + 1);
    }

    #[test]
    fn an_address_is_a_host_and_a_port() {
        let array = |words: &[&str]| Value::Array(words.iter().map(|word| Value::text(word)).collect());
        assert_eq!(named(&Value::Null), Ok(Word::Unknown));
        assert_eq!(named(&array(&["::1", "6379"])), Ok(Word::Master(Server::new("::1", 6379))));
        for odd in
            [array(&["a"]), array(&["a", "b"]), array(&["", "1"]), array(&["a", "65536"]), array(&["a", "1", "2"])]
        {
            assert!(named(&odd).is_err(), "{odd:?}");
        }
        assert!(named(&Value::Integer(1)).is_err());
    }
}
