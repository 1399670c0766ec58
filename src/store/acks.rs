//! How many replicas have what a connection wrote: WAIT behind the scripts, on their own connection.
//!
//! WAIT holds up whatever is asked behind it, so there is one at a time on each connection. An acquire that finds room
//! sends its own along, in the same round trip; whoever finds none is answered by the next, which is for all that was asked
//! before it.
//!
//! The number is about writes of this very connection, and about nothing else: one that has not written is told that all
//! replicas have everything. So it counts only where a script has said over the same connection that it wrote.

use std::{
    collections::VecDeque,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
    time::Duration,
};

use futures_util::{
    FutureExt,
    future::{BoxFuture, Shared},
    poll,
};
use tokio::time::sleep;

use super::{
    link::{Epoch, Link},
    wire::{Connection, Failure, Request, Until, Value},
};
use crate::{
    clock::Instant,
    error::{Error, Result, StoreError, StoreErrorKind},
    options::{Copies, millis},
};

/// How many are under way on a connection. With one, an acquire beside another takes a second round trip; with more, what is
/// behind them waits for as many timeouts where a replica is away: releases fail then.
const AT_ONCE: usize = 1;

/// Who has what was written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Acks {
    pub(crate) replicas: u32,
    /// The server itself, on its disk.
    pub(crate) on_disk: bool,
}

impl Acks {
    /// Whether that is enough.
    pub(crate) fn suffice(self, copies: Copies) -> bool {
        self.replicas >= copies.replicas && (self.on_disk || !copies.fsync)
    }
}

type Answer = Shared<BoxFuture<'static, std::result::Result<Acks, Failure>>>;

/// A WAIT.
struct Round {
    epoch: Epoch,
    number: u64,
    copies: Copies,
    answer: Answer,
}

/// The WAITs of a link.
#[derive(Default)]
pub(super) struct Rounds {
    /// Whether there has been one.
    any: AtomicBool,
    asked: Mutex<Asked>,
}

#[derive(Default)]
struct Asked {
    /// The number of the last.
    last: u64,
    /// Those under way, and some that were answered, in the order of their numbers.
    rounds: VecDeque<Round>,
}

/// A script that was asked, of which somebody may want to know who has what it wrote.
pub(crate) struct Receipt {
    connection: Connection,
    epoch: Epoch,
    /// The last WAIT that may have been asked before it.
    after: u64,
    copies: Copies,
}

impl std::fmt::Debug for Receipt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Receipt").field("epoch", &self.epoch).field("after", &self.after).finish_non_exhaustive()
    }
}

impl Rounds {
    fn asked(&self) -> MutexGuard<'_, Asked> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in the answers for which nobody may have waited.
    fn look(&self) {
        let under_way: Vec<Answer> = {
            let asked = self.asked();
            asked.rounds.iter().filter(|round| round.is_under_way()).map(|round| round.answer.clone()).collect()
        };
        // not while it is locked: a poll may wake whoever looks for the next
        for answer in under_way {
            let _ = answer.now_or_never();
        }
    }

    /// Whether what is asked now stands behind one.
    pub(super) fn hold_up(&self) -> bool {
        // most clients never ask for one
        if !self.any.load(Ordering::Relaxed) {
            return false;
        }
        self.look();
        self.asked().rounds.iter().any(Round::is_under_way)
    }
}

impl Round {
    fn is_under_way(&self) -> bool {
        self.answer.peek().is_none()
    }
}

impl Asked {
    /// Whether there may be one more on this connection.
    fn has_room(&self, epoch: Epoch) -> bool {
        self.rounds.iter().filter(|round| round.epoch == epoch && round.is_under_way()).count() < AT_ONCE
    }

    /// The next WAIT on this connection. It is asked when this returns.
    fn next(&mut self, connection: &Connection, epoch: Epoch, copies: Copies, limit: Duration) -> Answer {
        self.last += 1;
        let connection = connection.clone();
        let answer = async move { ask(&connection, copies, limit).await }.boxed().shared();
        // its first poll asks
        let _ = answer.clone().now_or_never();
        // what was answered is of use for a while to whoever was asked before it
        let is_over = |round: &Round| round.epoch != epoch || !round.is_under_way();
        while self.rounds.len() >= 2 * AT_ONCE && self.rounds.front().is_some_and(is_over) {
            self.rounds.pop_front();
        }
        self.rounds.push_back(Round { epoch, number: self.last, copies, answer: answer.clone() });
        answer
    }
}

/// Asks how many replicas have what this connection has written, and waits for as many as are wanted.
async fn ask(connection: &Connection, copies: Copies, limit: Duration) -> std::result::Result<Acks, Failure> {
    let (replicas, patience) = (copies.replicas.to_string(), millis(copies.timeout).to_string());
    let words = ["WAITAOF", "1", &replicas, &patience];
    let plain = ["WAIT", &replicas, &patience];
    let words = if copies.fsync { &words[..] } else { &plain[..] };
    let until = Until::new(Instant::now(), copies.timeout + limit);
    let number = |value: &Value| value.as_number().and_then(|number| u32::try_from(number).ok());
    let answer = connection.call(Request::Words(words), until).await?;
    let acks = match &answer {
        Value::Array(both) => match both.as_slice() {
            [own, replicas] => number(own).zip(number(replicas)),
            _ => None,
        },
        answer => number(answer).map(|replicas| (0, replicas)),
    };
    let (own, replicas) = acks.ok_or_else(|| Failure::Nonsense("WAIT was answered by something else".into()))?;
    Ok(Acks { replicas, on_disk: own > 0 })
}

impl Link {
    /// Asks for a script, and right behind it who has what it writes, unless that is being asked already.
    pub(super) async fn call_and_wait(
        &self,
        (epoch, connection): (Epoch, &Connection),
        request: Request<'_>,
        until: Until,
        copies: Copies,
    ) -> (std::result::Result<Value, Failure>, Receipt) {
        let mut asked = pin!(connection.call(request, until));
        let at_once = poll!(asked.as_mut());
        self.rounds.any.store(true, Ordering::Relaxed);
        self.rounds.look();
        let (after, mut along) = {
            let mut asked = self.rounds.asked();
            let after = asked.last;
            let along = asked.has_room(epoch) && at_once.is_pending();
            (after, along.then(|| asked.next(connection, epoch, copies, self.limit())))
        };
        let receipt = Receipt { connection: connection.clone(), epoch, after, copies };
        if let Poll::Ready(answer) = at_once {
            return (answer, receipt);
        }
        let answer = std::future::poll_fn(|cx| {
            // it is sent by being polled
            if along.as_mut().is_some_and(|along| along.poll_unpin(cx).is_ready()) {
                along = None;
            }
            asked.as_mut().poll(cx)
        });
        (answer.await, receipt)
    }

    /// Waits until enough replicas have what a script has written, or for as long as that may take: how many have it.
    ///
    /// The script may have been executed whatever becomes of this.
    pub(super) async fn acknowledged(&self, receipt: &Receipt, until: Until) -> Result<Acks, StoreError> {
        let Receipt { connection, epoch, after, copies } = receipt;
        let rounds = async {
            loop {
                let (answer, is_for_it) = {
                    let mut asked = self.rounds.asked();
                    let mut of_it = asked.rounds.iter().filter(|round| round.epoch == *epoch);
                    let covers = |round: &&Round| round.number > *after && round.copies.cover(*copies);
                    match (of_it.clone().find(covers), of_it.find(|round| round.is_under_way())) {
                        (Some(round), _) => (round.answer.clone(), true),
                        (None, Some(first)) if !asked.has_room(*epoch) => (first.answer.clone(), false),
                        _ => (asked.next(connection, *epoch, *copies, self.limit()), true),
                    }
                };
                let answer = answer.await;
                if is_for_it {
                    return answer;
                }
            }
        };
        let answer = self.in_time(until.left(Instant::now()), rounds).await.unwrap_or(Err(Failure::Late));
        let answer = if self.is_left() { Err(Failure::Ended) } else { answer };
        answer.map_err(|failure| self.failed(failure).that_may_have_executed())
    }

    /// Who has what was written last, whoever did, if the server can tell.
    async fn count_replicas(&self, copies: Copies) -> Result<Acks, StoreError> {
        let (_, connection) = self.up().await?;
        // to those who have not said so yet it is said that somebody waits
        ask(&connection, copies, self.limit()).await.map_err(|failure| self.failed(failure))
    }
}

/// For so long replicas are waited for that may have been about to come when the client connected.
const ABOUT_TO_COME: Duration = Duration::from_secs(1);
/// How often it is looked.
const LOOK: Duration = Duration::from_millis(50);

/// Whether these servers have replicas enough for any lock to be had. What is wrong is told before `limit` is over.
pub(super) async fn check(links: &[Arc<Link>], copies: Copies, address: &str, limit: Duration) -> Result<()> {
    let until = Instant::now() + ABOUT_TO_COME.min(limit / 3);
    let copies = Copies { timeout: copies.timeout.min(limit / 6).max(Duration::from_millis(1)), ..copies };
    let refuse = |reason| Err(Error::InvalidConfig { reason });
    for link in links {
        loop {
            let acks = match link.count_replicas(copies).await {
                Ok(acks) => acks,
                Err(error) if copies.fsync && matches!(error.kind(), StoreErrorKind::Other) => {
                    return refuse(format!(
                        "fsync needs Redis 7.2 or Valkey, with `appendonly yes`; {address} said: {}",
                        error.said()
                    ));
                }
                Err(source) => return Err(Error::Connect { address: address.to_owned(), source }),
            };
            if acks.replicas >= copies.replicas {
                // the disk may be slow, and is asked again with each acquire
                break;
            }
            if Instant::now() >= until {
                return refuse(format!(
                    "replicas are {}, and of {}, {} answered: no lock could be had; ask for fewer, or add replicas",
                    copies.replicas,
                    link.address(),
                    acks.replicas
                ));
            }
            sleep(LOOK).await;
        }
    }
    Ok(())
}
