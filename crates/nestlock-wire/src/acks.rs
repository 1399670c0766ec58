//! Counts the replicas that have what a connection wrote, with a WAIT after the scripts, on the
//! same connection.
//!
//! WAIT holds up every request behind it, so each connection has at most one in flight. A request
//! that finds none in flight sends its own WAIT in the same round trip. Otherwise it waits for the
//! next WAIT, which covers everything that was sent before it.
//!
//! The number covers only the writes of this connection: for a connection that has not written, the
//! server counts all replicas. So the number is valid only if a script has confirmed, over the same
//! connection, that it wrote.

use std::{
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures_util::{
    FutureExt,
    future::{BoxFuture, Shared},
};

use crate::{
    clock::{Instant, millis},
    connection::Connection,
    epoch::Epoch,
    failure::Failure,
    request::Request,
    resp::Value,
    until::Until,
};

/// The copies that a write needs, in addition to the server's own, before it counts.
///
/// ```
/// use std::time::Duration;
///
/// use nestlock_wire::{Acks, Copies};
///
/// let copies = Copies { replicas: 1, timeout: Duration::from_millis(500), fsync: false };
/// assert!(Acks { replicas: 1, on_disk: false }.suffice(copies));
/// assert!(!Acks { replicas: 0, on_disk: true }.suffice(copies));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Copies {
    /// How many replicas must have it.
    pub replicas: u32,
    /// How long to wait for them.
    pub timeout: Duration,
    /// Whether the write must also be on the disks of the server and of those replicas.
    pub fsync: bool,
}

impl Copies {
    /// Returns whether these copies are enough for `other`: at least as many replicas, and the same
    /// `fsync`.
    pub(crate) fn cover(self, other: Self) -> bool {
        self.replicas >= other.replicas && self.fsync == other.fsync
    }
}

/// The copies that a write has.
///
/// For an example, see [`Copies`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Acks {
    /// How many replicas have acknowledged it.
    pub replicas: u32,
    /// True if the server itself has it on disk.
    pub on_disk: bool,
}

impl Acks {
    /// Returns whether these copies are enough.
    #[must_use]
    pub fn suffice(self, copies: Copies) -> bool {
        self.replicas >= copies.replicas && (self.on_disk || !copies.fsync)
    }

    /// Returns the number of replicas, up to 255: each guard keeps it, in a single byte.
    #[must_use]
    pub fn counted(self) -> u8 {
        u8::try_from(self.replicas).unwrap_or(u8::MAX)
    }
}

type AcksReply = Shared<BoxFuture<'static, std::result::Result<Acks, Failure>>>;

/// A WAIT or WAITAOF.
struct WaitRequest {
    epoch: Epoch,
    number: u64,
    copies: Copies,
    reply: AcksReply,
}

/// The WAITs of a link.
#[derive(Default)]
pub(crate) struct WaitRequests {
    /// Whether a request has needed one yet.
    any: AtomicBool,
    last: Mutex<Option<WaitRequest>>,
}

/// A script that was sent, whose copies may be counted later.
///
/// ```no_run
/// # use nestlock_wire::{Call, Copies, Link, StoreError, Until};
/// # async fn example(
/// #     link: &Link,
/// #     call: &Call,
/// #     until: Until,
/// #     copies: Copies,
/// # ) -> Result<(), StoreError> {
/// let reply = link.eval(call, until, false, Some(copies)).await?;
/// if let Some(receipt) = &reply.receipt {
///     let acks = link.acknowledged(receipt, until).await?;
///     println!("{} replicas have it", acks.replicas);
/// }
/// # Ok(())
/// # }
/// ```
pub struct Receipt {
    connection: Connection,
    epoch: Epoch,
    /// The last WAIT that may have been sent before it.
    after: u64,
    copies: Copies,
}

/// The reply to a script.
///
/// For an example, see [`Call`].
///
/// [`Call`]: crate::Call
#[derive(Debug)]
pub struct ScriptReply {
    /// What the script returned.
    pub value: Value,
    /// The connection that brought it.
    pub epoch: Epoch,
    /// For [`Link::acknowledged`](crate::Link::acknowledged), if copies were asked for.
    pub receipt: Option<Receipt>,
}

impl std::fmt::Debug for Receipt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Receipt")
            .field("epoch", &self.epoch)
            .field("after", &self.after)
            .finish_non_exhaustive()
    }
}

impl WaitRequests {
    fn last(&self) -> MutexGuard<'_, Option<WaitRequest>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Polls the last WAIT for its reply, in case no other task waits for it.
    fn poll_last(&self) {
        let answer = self.last().as_ref().map(|last| last.reply.clone());
        let _ = answer.and_then(FutureExt::now_or_never);
    }

    /// Notes that a script was sent, and sends a WAIT right behind it unless one is in flight.
    /// Returns the script's receipt, and that WAIT: it is queued, and written when it is polled
    /// next. Without `sends`, no WAIT is sent: the script has already failed.
    pub(crate) fn behind(
        &self,
        epoch: Epoch,
        connection: &Connection,
        sends: bool,
        copies: Copies,
        limit: Duration,
    ) -> (Receipt, Option<AcksReply>) {
        self.any.store(true, Ordering::Relaxed);
        self.poll_last();
        let mut last = self.last();
        let after = last.as_ref().map_or(0, |last| last.number);
        let is_idle = last
            .as_ref()
            .is_none_or(|last| last.epoch != epoch || last.reply.peek().is_some());
        let along = (is_idle && sends).then(|| next(&mut last, connection, epoch, copies, limit));
        let receipt = Receipt {
            connection: connection.clone(),
            epoch,
            after,
            copies,
        };
        (receipt, along)
    }

    /// Returns the reply to the next WAIT, and whether it counts the copies of this script. Sends
    /// one if none is in flight.
    pub(crate) fn next_for(&self, receipt: &Receipt, limit: Duration) -> (AcksReply, bool) {
        let Receipt {
            connection,
            epoch,
            after,
            copies,
        } = receipt;
        let mut last = self.last();
        match &*last {
            Some(round)
                if round.epoch == *epoch
                    && round.number > *after
                    && round.copies.cover(*copies) =>
            {
                (round.reply.clone(), true)
            }
            Some(round) if round.epoch == *epoch && round.reply.peek().is_none() => {
                (round.reply.clone(), false)
            }
            _ => (next(&mut last, connection, *epoch, *copies, limit), true),
        }
    }

    /// Returns whether a request that is sent now stands behind a WAIT.
    pub(crate) fn hold_up(&self) -> bool {
        // most clients never send one
        if !self.any.load(Ordering::Relaxed) {
            return false;
        }
        self.poll_last();
        self.last()
            .as_ref()
            .is_some_and(|last| last.reply.peek().is_none())
    }
}

/// Sends the next WAIT on this connection. It is queued when this returns.
fn next(
    last: &mut Option<WaitRequest>,
    connection: &Connection,
    epoch: Epoch,
    copies: Copies,
    limit: Duration,
) -> AcksReply {
    let number = last.as_ref().map_or(0, |last| last.number) + 1;
    let connection = connection.clone();
    let answer = async move { send_wait(&connection, copies, limit).await }
        .boxed()
        .shared();
    // the first poll sends it
    let _ = answer.clone().now_or_never();
    *last = Some(WaitRequest {
        epoch,
        number,
        copies,
        reply: answer.clone(),
    });
    answer
}

/// Sends a WAIT, and returns how many replicas have what this connection wrote. It waits for as
/// many as `copies` requires, up to `copies.timeout`.
///
/// # Cancel safety
///
/// Cancel safe: it changes nothing.
///
/// ```no_run
/// # use std::time::Duration;
/// # use nestlock_wire::{Connection, Copies, Failure, send_wait};
/// # async fn example(connection: &Connection) -> Result<(), Failure> {
/// let copies = Copies { replicas: 2, timeout: Duration::from_millis(500), fsync: false };
/// let acks = send_wait(connection, copies, Duration::from_secs(3)).await?;
/// println!("{} of 2 replicas have it", acks.replicas);
/// # Ok(())
/// # }
/// ```
pub async fn send_wait(
    connection: &Connection,
    copies: Copies,
    limit: Duration,
) -> std::result::Result<Acks, Failure> {
    let (replicas, patience) = (
        copies.replicas.to_string(),
        millis(copies.timeout).to_string(),
    );
    let words = ["WAITAOF", "1", &replicas, &patience];
    let plain = ["WAIT", &replicas, &patience];
    let words = if copies.fsync { &words[..] } else { &plain[..] };
    let until = Until::new(Instant::now(), copies.timeout.saturating_add(limit));
    let number = |value: &Value| {
        value
            .as_number()
            .and_then(|number| u32::try_from(number).ok())
    };
    let answer = connection.call(Request::Words(words), until).await?;
    let acks = match &answer {
        Value::Array(both) => match both.as_slice() {
            [own, replicas] => number(own).zip(number(replicas)),
            _ => None,
        },
        answer => number(answer).map(|replicas| (0, replicas)),
    };
    let (own, replicas) =
        acks.ok_or_else(|| Failure::Nonsense("unexpected reply to WAIT".into()))?;
    Ok(Acks {
        replicas,
        on_disk: own > 0,
    })
}
