//! How many replicas have what a connection wrote: WAIT behind the scripts, on their own connection.
//!
//! WAIT holds up whatever is asked behind it, so there is one at a time on each connection. An acquire that finds none under
//! way sends its own along, in the same round trip; whoever finds one is answered by the next, which is for all that was
//! asked before it.
//!
//! The number is about writes of this very connection, and about nothing else: one that has not written is told that all
//! replicas have everything. So it counts only where a script has said over the same connection that it wrote.

use std::{
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

    /// How many replicas, up to 255: each guard keeps it, in no more than a byte.
    pub(crate) fn counted(self) -> u8 {
        u8::try_from(self.replicas).unwrap_or(u8::MAX)
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
    last: Mutex<Option<Round>>,
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
    fn last(&self) -> MutexGuard<'_, Option<Round>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in the last one's answer, for which nobody may have waited.
    fn look(&self) {
        let answer = self.last().as_ref().map(|last| last.answer.clone());
        let _ = answer.and_then(FutureExt::now_or_never);
    }

    /// Whether what is asked now stands behind one.
    pub(super) fn hold_up(&self) -> bool {
        // most clients never ask for one
        if !self.any.load(Ordering::Relaxed) {
            return false;
        }
        self.look();
        self.last().as_ref().is_some_and(|last| last.answer.peek().is_none())
    }
}

/// The next WAIT on this connection. It is asked when this returns.
fn next(last: &mut Option<Round>, connection: &Connection, epoch: Epoch, copies: Copies, limit: Duration) -> Answer {
    let number = last.as_ref().map_or(0, |last| last.number) + 1;
    let connection = connection.clone();
    let answer = async move { ask(&connection, copies, limit).await }.boxed().shared();
    // its first poll asks
    let _ = answer.clone().now_or_never();
    *last = Some(Round { epoch, number, copies, answer: answer.clone() });
    answer
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
            let mut last = self.rounds.last();
            let after = last.as_ref().map_or(0, |last| last.number);
            let is_idle = last.as_ref().is_none_or(|last| last.epoch != epoch || last.answer.peek().is_some());
            let along = is_idle && at_once.is_pending();
            (after, along.then(|| next(&mut last, connection, epoch, copies, self.limit())))
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
                    let mut last = self.rounds.last();
                    match &*last {
                        Some(round)
                            if round.epoch == *epoch && round.number > *after && round.copies.cover(*copies) =>
                        {
                            (round.answer.clone(), true)
                        }
                        Some(round) if round.epoch == *epoch && round.answer.peek().is_none() => {
                            (round.answer.clone(), false)
                        }
                        _ => (next(&mut last, connection, *epoch, *copies, self.limit()), true),
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
                Err(error)
                    if copies.fsync
                        && matches!(error.kind(), StoreErrorKind::Other | StoreErrorKind::UnknownCommand) =>
                {
                    return refuse(format!(
                        "fsync needs Redis 7.2 or Valkey, with `appendonly yes`; {address} said: {}",
                        error.said()
                    ));
                }
                Err(source) => return Err(Error::Connect { address: address.to_owned(), source: source.of_a_read() }),
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
