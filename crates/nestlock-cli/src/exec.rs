//! `exec`: a command under a lock.

use std::{
    ffi::OsString,
    time::{Duration, Instant},
};

use nestlock::{AcquireOptions, Error, Lock, LockGuard, OwnerId};
use nix::sys::signal::Signal;

use crate::{
    Failure,
    args::{Exec, Server, Unusable},
    child::{Change, Child},
    kind::Kind,
    signals::{Signals, is_stop},
};

/// A machine that slept wakes up in the midst of a pause: so none is longer.
const LOOK: Duration = Duration::from_millis(500);
/// Who asks twice within this time means it.
const TWICE: Duration = Duration::from_secs(2);
/// The longest grace that is not asked for.
const GRACE: Duration = Duration::from_secs(10);
/// How often what is left of the group is looked at.
const LEFT: Duration = Duration::from_millis(20);

/// Stopped by a signal before the command was begun.
fn stopped(signal: Signal) -> u8 {
    128 + signal as u8
}

pub(crate) async fn run(server: &Server, exec: &Exec) -> Result<u8, Failure> {
    let grace = grace(exec)?;
    let kind = if exec.shared { Kind::Read } else { exec.kind };
    let mut signals = Signals::listen()?;
    let client = tokio::select! {
        biased;
        signal = signals.stop() => return Ok(stopped(signal)),
        client = server.connect_for(Some(exec.lease), exec.application()) => client?,
    };
    let lock = kind.lock(&client, &exec.name)?;
    let above = if exec.no_inherit { None } else { Above::of(&lock, kind) };
    let acquired = tokio::select! {
        biased;
        signal = signals.stop() => Err(signal),
        hold = hold(&lock, above, exec) => Ok(hold),
    };
    let hold = match acquired {
        Ok(Ok(Some(hold))) => hold,
        Ok(Ok(None)) => return Ok(exec.conflict_exit_code),
        Ok(Err(error)) => return Err(error.into()),
        // what was under way is undone: no place in a queue stays
        Err(signal) => {
            let _ = client.shutdown().await;
            return Ok(stopped(signal));
        }
    };
    // nothing is begun after it was told to stop
    let code = tokio::select! {
        biased;
        signal = signals.stop() => Ok(Some(stopped(signal))),
        () = std::future::ready(()) => command(&lock, kind, &hold, exec, grace, &mut signals).await,
    };
    let kept = hold.give_back().await;
    let _ = client.shutdown().await;
    match (code?, kept) {
        (_, Err(Error::Lost { .. } | Error::NotHeld { .. })) | (None, _) => Ok(exec.lost_code),
        (Some(code), Ok(())) => Ok(code),
        (Some(code), Err(error)) => {
            eprintln!("nestlock: the lock is free when its lease is over: {error}");
            Ok(code)
        }
    }
}

fn grace(exec: &Exec) -> Result<Duration, Unusable> {
    let most = exec.lease / 3;
    match exec.grace {
        Some(grace) if grace > most => {
            Err(Unusable(format!("--grace {grace:?} does not fit into a lease of {:?}: {most:?} at most", exec.lease)))
        }
        Some(grace) => Ok(grace),
        None => Ok(most.min(GRACE)),
    }
}

/// Where another `exec` above this one has the same lock: whose hold it is.
struct Above(OwnerId);

impl Above {
    /// The lock and its kind, in letters that a variable may have.
    fn variable(lock: &Lock, kind: Kind) -> String {
        let name = format!("{}/{}", kind.name(), lock.name());
        name.bytes().fold("NESTLOCK_OWNER_".to_owned(), |variable, byte| format!("{variable}{byte:02X}"))
    }

    fn of(lock: &Lock, kind: Kind) -> Option<Self> {
        let owner = std::env::var(Self::variable(lock, kind)).ok()?;
        OwnerId::from_value(&owner).ok().map(Self)
    }
}

/// What the command runs under.
enum Hold {
    Own(LockGuard),
    /// Another `exec`'s, which this one goes along with: it keeps it alive and never changes its count.
    Theirs {
        lock: Lock,
        owner: OwnerId,
        lease: Duration,
        /// When it was asked for.
        asked: Instant,
    },
}

async fn hold(lock: &Lock, above: Option<Above>, exec: &Exec) -> nestlock::Result<Option<Hold>> {
    if let Some(Above(owner)) = above {
        let asked = Instant::now();
        match lock.extend(&owner, exec.lease).await {
            Ok(()) => return Ok(Some(Hold::Theirs { lock: lock.clone(), owner, lease: exec.lease, asked })),
            // it is over: as if there was none
            Err(Error::NotHeld { .. } | Error::Lost { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    let options = AcquireOptions::new().watchdog_timeout(exec.lease);
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

    /// As it was acquired.
    fn begun(&self) -> Alive {
        let now = Instant::now();
        match self {
            Self::Own(guard) => Alive { until: now + guard.remaining(), asked: now },
            Self::Theirs { lease, asked, .. } => Alive { until: *asked + *lease, asked: *asked },
        }
    }

    /// Keeps it alive for a while, and says until when it is; or how it was lost.
    async fn keep(&self, alive: Alive) -> Result<Alive, Error> {
        match self {
            Self::Own(guard) => tokio::select! {
                // first: what is known to be lost has no time left
                biased;
                error = guard.lost() => Err(error),
                () = tokio::time::sleep(LOOK) => Ok(Alive { until: Instant::now() + guard.remaining(), ..alive }),
            },
            Self::Theirs { lock, owner, lease, .. } => {
                let pause = (alive.asked + *lease / 3).saturating_duration_since(Instant::now());
                if !pause.is_zero() {
                    tokio::time::sleep(pause.min(LOOK)).await;
                    return Ok(alive);
                }
                let asked = Instant::now();
                match lock.extend(owner, *lease).await {
                    Ok(()) => return Ok(Alive { until: asked + *lease, asked }),
                    Err(error @ (Error::NotHeld { .. } | Error::Lost { .. })) => return Err(error),
                    // again, for as long as it lives
                    Err(_) => tokio::time::sleep(LOOK.min(*lease / 10)).await,
                }
                Ok(alive)
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

/// Until when the hold may be relied on.
#[derive(Clone, Copy)]
struct Alive {
    until: Instant,
    /// When the last question was sent that was answered.
    asked: Instant,
}

/// What the command's end was asked for by.
#[derive(Default)]
struct Ending {
    /// The lock was lost, or is about to be.
    is_lost: bool,
    /// When those get KILL who are still there.
    kill_at: Option<Instant>,
}

impl Ending {
    fn of_loss(&mut self, child: &Child, kill_at: Instant, why: &str) {
        if !std::mem::replace(&mut self.is_lost, true) {
            eprintln!("nestlock: {why}: the command is ended");
            child.send(Signal::SIGTERM);
            self.kill_at = Some(kill_at);
        }
    }
}

/// Runs the command for as long as the lock is held; its exit code, or `None`: the lock was lost.
async fn command(
    lock: &Lock,
    kind: Kind,
    hold: &Hold,
    exec: &Exec,
    grace: Duration,
    signals: &mut Signals,
) -> Result<Option<u8>, Failure> {
    let shell = |line: &OsString| vec![shell(), "-c".into(), line.clone()];
    let program = exec.line.as_ref().map_or_else(|| exec.program.clone(), shell);
    let mut child = Child::begin(&program, variables(lock, kind, hold))?;
    let mut alive = hold.begun();
    // not begun anew while it waits for an answer, however long that takes
    let mut keeping = Box::pin(hold.keep(alive));
    let (mut ending, mut last_stop, mut is_known) = (Ending::default(), None::<Instant>, true);
    let code = loop {
        match child.change()? {
            Some(Change::Ended(code)) => break code,
            Some(Change::Stopped) => child.stop_along(),
            None => {}
        }
        let now = Instant::now();
        if ending.kill_at.is_some_and(|at| at <= now) {
            child.send(Signal::SIGKILL);
        } else if alive.until.saturating_duration_since(now) <= grace {
            ending.of_loss(&child, alive.until, "the lock could not be renewed");
        }
        let next = ending.kill_at.unwrap_or(alive.until.checked_sub(grace).unwrap_or(now));
        tokio::select! {
            biased;
            signal = signals.next_or_child() => match signal {
                Some(signal) if is_stop(signal) && last_stop.is_some_and(|last| last.elapsed() < TWICE) => {
                    child.send(Signal::SIGKILL);
                }
                Some(signal) => {
                    child.send(signal);
                    last_stop = if is_stop(signal) { Some(Instant::now()) } else { last_stop };
                }
                None => {}
            },
            kept = &mut keeping, if is_known => match kept {
                Ok(kept) => {
                    alive = kept;
                    keeping.set(hold.keep(alive));
                }
                Err(error) => {
                    is_known = false;
                    ending.of_loss(&child, Instant::now() + grace, &error.to_string());
                }
            },
            () = tokio::time::sleep(next.saturating_duration_since(now).clamp(LEFT, LOOK)) => {}
        }
    };
    end_rest(&child, grace.min(alive.until.saturating_duration_since(Instant::now()))).await;
    Ok(Some(code).filter(|_| !ending.is_lost))
}

/// Ends what the command has left in its group: nothing of it runs on without the lock.
async fn end_rest(child: &Child, grace: Duration) {
    if !child.has_left_any() {
        return;
    }
    let over = Instant::now() + grace;
    child.send(Signal::SIGTERM);
    while child.has_left_any() && Instant::now() < over {
        tokio::time::sleep(LEFT).await;
    }
    child.send(Signal::SIGKILL);
}

fn shell() -> OsString {
    std::env::var_os("SHELL").unwrap_or_else(|| "/bin/sh".into())
}

/// What the command is told.
fn variables(lock: &Lock, kind: Kind, hold: &Hold) -> Vec<(String, String)> {
    let owner = hold.owner().to_string();
    let depth = std::env::var("NESTLOCK_DEPTH").ok().and_then(|depth| depth.parse::<u32>().ok()).unwrap_or_default();
    let mut variables = vec![
        ("NESTLOCK_NAME".to_owned(), lock.name().to_owned()),
        ("NESTLOCK_KIND".to_owned(), kind.name()),
        ("NESTLOCK_OWNER".to_owned(), owner.clone()),
        ("NESTLOCK_DEPTH".to_owned(), (depth + 1).to_string()),
        (Above::variable(lock, kind), owner),
    ];
    if let Hold::Own(guard) = hold
        && let Some(token) = guard.fencing_token()
    {
        variables.push(("NESTLOCK_TOKEN".to_owned(), token.to_string()));
    }
    variables
}
