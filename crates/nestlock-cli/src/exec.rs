//! `exec`: runs a command under a lock.

use std::{
    ffi::OsString,
    ops::Range,
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use nestlock::{AcquireOptions, Error, Lock, LockClient, LockGuard, OwnerId, Permits};
use nix::sys::signal::Signal;

use crate::{
    args::{Exec, OnLost, Server},
    child::{Change, Child, Variables},
    failure::{FAILED, Failure, Unusable},
    family::{AT_LAST, Tries, unended},
    guard::LEFT,
    kind::Kind,
    locks::held_secs,
    signals::{Signals, end_by_interrupt, is_stop},
    stderr::warn,
    wait,
};

/// Longest pause between two checks of the lease. A suspended machine may wake up in the middle of
/// a pause, and a long pause would delay the next check.
const LOOK: Duration = Duration::from_millis(500);
/// Minimum number of checks per lease.
const LOOKS: u32 = 10;
/// How soon a second INT or TERM has to follow to mean "kill now". An earlier repeat does not
/// count: `timeout` signals a process and then its group.
const TWICE: Range<Duration> = Duration::from_millis(100)..Duration::from_secs(2);
/// Longest default grace.
const GRACE: Duration = Duration::from_secs(10);
/// How long the server has to reply to the release after the command has ended.
const ANSWER: Duration = Duration::from_millis(300);

/// How long the client has to leave the wait queue after a signal.
const LEAVE: Duration = Duration::from_secs(1);
/// A divisor: KILL is sent 1/20 of the lease before its end, so that all processes have ended by
/// then.
const SPARE: u32 = 20;
const STOOD_STILL: &str = "nestlock was suspended until the end of the lease";
/// A divisor: the guards send KILL 1/40 of the lease before its end if nestlock has not.
const SPARE_OF_GUARDS: u32 = 40;
/// Exit code (`EX_NOPERM`): the lock was lost, and a process of the command cannot be ended.
const UNENDED: u8 = 77;

/// Ends nestlock as `signal` would have, or returns the exit code 128+N. SIGINT ends the process
/// itself, because a shell loop continues after an exit code. `all`: also sends it to the rest of
/// nestlock's process group, which did not get it.
fn as_by(signal: Signal, all: bool) -> u8 {
    if signal == Signal::SIGINT {
        end_by_interrupt(all);
    }
    128 + signal as u8
}

pub(crate) async fn run(server: &Server, exec: &Exec) -> Result<u8, Failure> {
    let grace = grace(exec)?;
    let kind = exec.kind()?;
    // before the signal listeners start: the URL may come from a pipe without a writer, and a
    // signal must still end this process
    server.url()?;
    let mut signals = Signals::listen()?;
    let client = tokio::select! {
        biased;
        signal = signals.stop() => return Ok(as_by(signal, false)),
        client = server.connect_for(Some(exec.lease), exec.replicas, exec.application()) => client?,
    };
    let permits = exec
        .permits
        .map(|n| client.permits(&exec.name, n))
        .transpose()?
        .map(|permits| permits.fair(exec.fair));
    let lock = match &permits {
        Some(permits) => permits.many(1)?,
        None => kind.lock(&client, &exec.name)?,
    };
    let above = if exec.no_inherit {
        None
    } else {
        Above::of(&lock, kind)
    };
    let acquired = tokio::select! {
        biased;
        signal = signals.stop() => Err(signal),
        hold = hold(&lock, permits.as_ref(), above, exec) => Ok(hold),
    };
    let hold = match acquired {
        Ok(Ok(Some(hold))) => hold,
        Ok(Ok(None)) => {
            tell_holders(&client, &lock, kind, exec).await;
            return Ok(exec.conflict_exit_code);
        }
        Ok(Err(error)) => return Err(error.into()),
        // undo what is in flight, or an entry would stay in the wait queue
        Err(signal) => {
            tokio::select! {
                biased;
                _ = client.shutdown() => {}
                _ = signals.stop() => at_once(client.clone()),
                () = tokio::time::sleep(LEAVE) => at_once(client.clone()),
            }
            return Ok(as_by(signal, false));
        }
    };
    // a signal that has already arrived must keep the command from starting
    let outcome = tokio::select! {
        biased;
        signal = signals.stop() => Ok(Outcome::By { signal, all: false }),
        () = std::future::ready(()) => command(&lock, kind, &hold, exec, grace, &mut signals).await,
    };
    if let Ok(Outcome::Unended) = outcome {
        // do not release the rest of the lease: a process of the command still runs
        std::mem::forget(hold);
        at_once(client);
        return Ok(UNENDED);
    }
    // do not wait longer for a server that does not reply: the lease frees the lock
    let end = tokio::time::Instant::now() + ANSWER;
    let kept = match tokio::time::timeout_at(end, hold.give_back()).await {
        Ok(kept) => kept.map_err(|error| {
            let is_lost = matches!(error, Error::Lost { .. } | Error::NotHeld { .. });
            (is_lost, error.to_string())
        }),
        Err(_) => Err((false, format!("no reply within {ANSWER:?}"))),
    };
    if tokio::time::timeout_at(end, client.shutdown())
        .await
        .is_err()
    {
        at_once(client);
    }
    let outcome = outcome?;
    match kept {
        Err((true, _)) => return Ok(exec.lost_code),
        Err((false, why)) if !matches!(outcome, Outcome::Lost) => {
            warn(format_args!(
                "the release was not confirmed; the lock is free when its lease ends: {why}"
            ));
        }
        _ => {}
    }
    Ok(match outcome {
        Outcome::Code(code) => code,
        Outcome::By { signal, all } => as_by(signal, all),
        Outcome::Lost => exec.lost_code,
        Outcome::Unended => UNENDED,
    })
}

/// Tells the notes of the holders of a busy lock. Those without one stay unnamed.
async fn tell_holders(client: &LockClient, lock: &Lock, kind: Kind, exec: &Exec) {
    let mut locks = vec![lock.clone()];
    // the other half may be held
    let other = match kind {
        Kind::Read => Some(Kind::Write),
        Kind::Write => Some(Kind::Read),
        _ => None,
    };
    locks.extend(other.and_then(|other| other.lock(client, &exec.name).ok()));
    let notes = join_all(locks.iter().map(Lock::notes));
    let notes = tokio::time::timeout(ANSWER, notes)
        .await
        .unwrap_or_default();
    for note in notes.into_iter().flatten().flatten() {
        let (application, host, process) = (&note.application, &note.host, note.process);
        let (held, why) = (held_secs(&note), &note.note);
        warn(format_args!(
            "busy: held for {held} s by {application} on {host}, process {process}: {why}"
        ));
    }
}

/// Leaks the client: dropping its last handle would wait for replies.
fn at_once(client: LockClient) {
    std::mem::forget(client);
}

fn grace(exec: &Exec) -> Result<Duration, Unusable> {
    let most = exec.lease / 3;
    match exec.grace {
        Some(grace) if grace > most => Err(Unusable(format!(
            "--grace {grace:?} is too long for a lease of {:?}: use at most {most:?}",
            exec.lease
        ))),
        Some(grace) => Ok(grace),
        None => Ok(most.min(GRACE)),
    }
}

/// The owner of the hold if an outer `exec` already has the same lock.
struct Above(OwnerId);

impl Above {
    /// Returns the name of an environment variable for this lock and kind, in hex because few
    /// characters are allowed in such names.
    fn variable(what: &str, lock: &Lock, kind: Kind) -> String {
        let name = format!("{}/{}", kind.name(), lock.name());
        name.bytes()
            .fold(format!("NESTLOCK_{what}_"), |variable, byte| {
                format!("{variable}{byte:02X}")
            })
    }

    fn of(lock: &Lock, kind: Kind) -> Option<Self> {
        let owner = std::env::var(Self::variable("OWNER", lock, kind)).ok()?;
        OwnerId::from_value(&owner).ok().map(Self)
    }
}

/// The hold under which the command runs.
enum Hold {
    Own(LockGuard),
    /// The hold of an outer `exec`. This process renews it, but never changes its hold count.
    Theirs {
        lock: Lock,
        owner: OwnerId,
        lease: Duration,
        /// When the request that extended it was sent.
        asked: Instant,
    },
}

async fn hold(
    lock: &Lock,
    permits: Option<&Permits>,
    above: Option<Above>,
    exec: &Exec,
) -> nestlock::Result<Option<Hold>> {
    if let Some(Above(owner)) = above {
        let asked = Instant::now();
        match lock.extend(&owner, exec.lease).await {
            Ok(()) => {
                return Ok(Some(Hold::Theirs {
                    lock: lock.clone(),
                    owner,
                    lease: exec.lease,
                    asked,
                }));
            }
            // the outer hold is over: acquire a new one
            Err(Error::NotHeld { .. } | Error::Lost { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    // the server keeps the number of the first acquire, but the number may have been edited since
    if let Some((permits, n)) = permits.zip(exec.permits) {
        permits.set_permits(n).await?;
    }
    let mut options = AcquireOptions::new().watchdog_timeout(exec.lease);
    if let Some(note) = &exec.note {
        options = options.note(note);
    }
    let guard = match exec.wait {
        _ if exec.nonblock => lock.try_lock_with(options).await?,
        Some(wait) => lock.try_lock_for_with(wait, options).await?,
        None => Some(lock.lock_with(options).await?),
    };
    Ok(guard.map(Hold::Own))
}

impl Hold {
    fn owner(&self) -> OwnerId {
        match self {
            Self::Own(guard) => guard.owner(),
            Self::Theirs { owner, .. } => owner.clone(),
        }
    }

    /// Returns when the request that confirmed the hold was sent. For an own hold this is the
    /// current time, which [`Self::until`] ignores.
    fn asked(&self) -> Instant {
        match self {
            Self::Own(_) => Instant::now(),
            Self::Theirs { asked, .. } => *asked,
        }
    }

    /// Returns until when the hold is valid, as far as is known now. `asked`: when the last
    /// acknowledged `extend` was sent, which matters only for the hold of an outer `exec`.
    fn until(&self, asked: Instant) -> Instant {
        match self {
            Self::Own(guard) => Instant::now() + guard.remaining(),
            Self::Theirs { lease, .. } => asked + *lease,
        }
    }

    /// Keeps the hold alive for a while, and returns when the last acknowledged `extend` was sent.
    /// Fails if the hold is lost. For an own hold it returns only then, as the watchdog renews it.
    async fn keep(&self, asked: Instant) -> Result<Instant, Error> {
        match self {
            Self::Own(guard) => Err(guard.lost().await),
            Self::Theirs {
                lock, owner, lease, ..
            } => {
                let pause = (asked + *lease / 3).saturating_duration_since(Instant::now());
                if !pause.is_zero() {
                    tokio::time::sleep(pause.min(LOOK)).await;
                    return Ok(asked);
                }
                let (before, asked) = (asked, Instant::now());
                match lock.extend(owner, *lease).await {
                    Ok(()) => return Ok(asked),
                    Err(error @ (Error::NotHeld { .. } | Error::Lost { .. })) => return Err(error),
                    // retry while the lease lasts
                    Err(_) => tokio::time::sleep(LOOK.min(*lease / 10)).await,
                }
                Ok(before)
            }
        }
    }

    async fn give_back(self) -> nestlock::Result<()> {
        match self {
            Self::Own(guard) => guard.unlock().await,
            Self::Theirs { .. } => Ok(()),
        }
    }
}

/// Whether, when and why the command is ended.
#[derive(Default)]
struct Ending {
    /// The lock was lost, or is about to be.
    is_lost: bool,
    /// When the remaining processes get KILL.
    kill_at: Option<Instant>,
    tries: Tries,
    /// Processes that cannot be ended were reported.
    is_said: bool,
}

/// How the command ended.
enum Outcome {
    /// Everything has ended, with this exit code.
    Code(u8),
    /// Everything has ended, or did not start, because of this signal. `all`: the signal came from
    /// a terminal that the command had for itself.
    By { signal: Signal, all: bool },
    /// Everything has ended, or did not start, but the lock was lost before.
    Lost,
    /// The lock was lost, and a process cannot be ended.
    Unended,
}

impl Ending {
    fn of_loss(&mut self, kill_at: Instant, why: &str) {
        if !std::mem::replace(&mut self.is_lost, true) {
            self.at(kill_at);
            warn(format_args!("{why}: ending the command"));
        }
    }

    /// Returns when the remaining processes get KILL if the lock was lost. Another owner may have
    /// it by then.
    fn lost_at(&self) -> Option<Instant> {
        self.kill_at.filter(|_| self.is_lost)
    }

    /// Sets when the processes that the command left behind get KILL, unless a time is set.
    fn of_rest(&mut self, kill_at: Instant) {
        self.kill_at.get_or_insert(kill_at);
    }

    fn at(&mut self, kill_at: Instant) {
        self.kill_at = Some(self.kill_at.map_or(kill_at, |sooner| sooner.min(kill_at)));
    }

    /// Does what is due, and returns the pause until the next call. Returns `None` if the command
    /// is not being ended, and `Err` if the lock is lost and a process cannot be ended.
    fn go_on(&mut self, child: &mut Child, now: Instant) -> Result<Option<Duration>, ()> {
        let Some(kill_at) = self.kill_at else {
            return Ok(None);
        };
        let left = kill_at.saturating_duration_since(now);
        // without a grace there is no TERM
        if !left.is_zero() {
            child.ask();
            return Ok(Some(left.min(LEFT)));
        }
        let left = child.end(&self.tries);
        let for_long = self.tries.for_long();
        let unended = unended(&left, for_long);
        if unended.is_empty() && !for_long {
            return Ok(Some(self.tries.pause(&left)));
        }
        let then = if self.is_lost {
            "it runs on although the lock is lost"
        } else {
            "nestlock keeps the lock until it has ended"
        };
        if self.is_lost || !std::mem::replace(&mut self.is_said, true) {
            for member in unended {
                warn(format_args!("{member}; {then}"));
            }
            if unended.is_empty() {
                warn(format_args!(
                    "a process of the command cannot be found, because /proc does not show it; {then}"
                ));
            }
            if unended.iter().any(|member| member.is_refused) {
                warn(
                    "run nestlock as that user, `sudo nestlock exec ..` instead of `nestlock exec .. sudo`",
                );
            }
        }
        if self.is_lost {
            Err(())
        } else {
            Ok(Some(AT_LAST))
        }
    }
}

/// Runs the command while the lock is held.
async fn command(
    lock: &Lock,
    kind: Kind,
    hold: &Hold,
    exec: &Exec,
    grace: Duration,
    signals: &mut Signals,
) -> Result<Outcome, Failure> {
    let shell = |line: &OsString| vec![shell(), "-c".into(), line.clone()];
    let program = exec
        .line
        .as_ref()
        .map_or_else(|| exec.program.clone(), shell);
    let mut asked = hold.asked();
    let before = |until: Instant, part: u32| until.checked_sub(exec.lease / part).unwrap_or(until);
    let deadline = || before(hold.until(asked), SPARE_OF_GUARDS);
    let Some(mut child) =
        Child::begin(&program, variables(lock, kind, hold), deadline, signals).await?
    else {
        warn(format_args!("{STOOD_STILL}: the command was not started"));
        return Ok(Outcome::Lost);
    };
    // not restarted in each pass: that would cancel a request in flight, and a reply that takes
    // longer than a pass would never arrive
    let mut keeping = Box::pin(hold.keep(asked));
    let (mut ending, mut is_known, mut is_guarded) = (Ending::default(), true, true);
    let mut last_stop = None::<(Signal, Instant)>;
    let mut came = None::<Signal>;
    loop {
        while let Some(change) = child.change() {
            match change {
                Change::Stopped(signal) => {
                    let had_terminal = child.stop_along(signal);
                    if hold.until(asked) <= Instant::now() {
                        // the command must not resume without the lock
                        ending.of_loss(Instant::now(), "the lease had ended when nestlock resumed");
                    } else {
                        child.go_on(had_terminal);
                    }
                }
                Change::Overdue => ending.of_loss(Instant::now(), STOOD_STILL),
                Change::Unguarded => {
                    ending.at(Instant::now());
                    warn("a guard of the command was killed: ending the command");
                    is_guarded = false;
                }
            }
        }
        if child.is_over() {
            break;
        }
        let (now, until) = (Instant::now(), hold.until(asked));
        match came.take() {
            Some(signal @ (Signal::SIGINT | Signal::SIGTERM))
                if last_stop
                    .is_some_and(|(last, at)| last == signal && TWICE.contains(&at.elapsed())) =>
            {
                ending.at(now);
            }
            Some(signal) => {
                child.send(signal);
                last_stop = if is_stop(signal) {
                    Some((signal, now))
                } else {
                    last_stop
                };
            }
            None => {}
        }
        if child.ended().is_some() && !exec.wait_group {
            ending.of_rest(now + grace);
        }
        let kill_at = before(until, SPARE);
        let renewed_by = kill_at.checked_sub(grace).unwrap_or(now);
        if renewed_by <= now {
            ending.of_loss(kill_at, "the lock could not be renewed");
        }
        child.until(
            ending
                .lost_at()
                .unwrap_or_else(|| before(until, SPARE_OF_GUARDS)),
        );
        let Ok(pause) = ending.go_on(&mut child, now) else {
            return Ok(Outcome::Unended);
        };
        // short enough for the guards to learn of a renewal in time
        let longest = LOOK.min(exec.lease / LOOKS);
        let pause = pause.unwrap_or_else(|| renewed_by.saturating_duration_since(now).min(longest));
        tokio::select! {
            biased;
            signal = signals.next_or_child() => came = signal,
            () = child.told() => {}
            kept = &mut keeping, if is_known => match kept {
                Ok(kept) => {
                    asked = kept;
                    keeping.set(hold.keep(asked));
                }
                Err(error) => {
                    is_known = false;
                    let grace = if exec.on_lost == OnLost::Kill { Duration::ZERO } else { grace };
                    ending.of_loss(Instant::now() + grace, &error.to_string());
                }
            },
            () = tokio::time::sleep(pause) => {}
        }
    }
    let ended = child
        .ended()
        .unwrap_or(wait::End::Signal(Signal::SIGKILL as u8));
    Ok(if ending.is_lost {
        Outcome::Lost
    } else if !is_guarded {
        Outcome::Code(FAILED)
    } else if ended == wait::End::Signal(Signal::SIGINT as u8) {
        Outcome::By {
            signal: Signal::SIGINT,
            all: child.had_terminal(),
        }
    } else {
        Outcome::Code(ended.code())
    })
}

fn shell() -> OsString {
    std::env::var_os("SHELL").unwrap_or_else(|| "/bin/sh".into())
}

/// Returns the environment of the command. It describes the command's own lock, even if an outer
/// `exec` has set these variables for another lock.
fn variables(lock: &Lock, kind: Kind, hold: &Hold) -> Variables {
    let owner = hold.owner().to_string();
    let depth = std::env::var("NESTLOCK_DEPTH")
        .ok()
        .and_then(|depth| depth.parse::<u32>().ok())
        .unwrap_or_default();
    let of_lock = Above::variable("TOKEN", lock, kind);
    let token = match hold {
        Hold::Own(guard) => guard.fencing_token().map(|token| token.to_string()),
        Hold::Theirs { .. } => std::env::var(&of_lock).ok(),
    };
    vec![
        ("NESTLOCK_NAME".to_owned(), Some(lock.name().to_owned())),
        ("NESTLOCK_KIND".to_owned(), Some(kind.name())),
        ("NESTLOCK_OWNER".to_owned(), Some(owner.clone())),
        ("NESTLOCK_DEPTH".to_owned(), Some((depth + 1).to_string())),
        ("NESTLOCK_TOKEN".to_owned(), token.clone()),
        (Above::variable("OWNER", lock, kind), Some(owner)),
        (of_lock, token),
    ]
}
