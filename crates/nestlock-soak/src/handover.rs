//! Holds that were left to their lease: a folder in which their task leaves the owner's name, for
//! any process to release them.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use nestlock::{Error, OwnerId};

use crate::{
    clock::{SECOND, now},
    history::{History, word},
    kinds::Choice,
};

/// How long the task waits for another one to release the hold, in nanoseconds: less than what is
/// left of the shortest lease.
const PATIENCE: u64 = SECOND / 2;

#[derive(Debug, Clone)]
pub(crate) struct Mailbox(pub(crate) PathBuf);

/// A hold that was taken out of the mailbox.
#[derive(Debug)]
pub(crate) struct Given {
    /// `TASK#OP` of the giver.
    pub(crate) what: String,
    pub(crate) lock: String,
    pub(crate) owner: OwnerId,
    done: PathBuf,
}

impl Mailbox {
    /// Leaves the name of an owner. The file is renamed into its place, so that no process reads
    /// half of it.
    pub(crate) fn give(&self, what: &str, lock: &str, owner: &OwnerId) -> io::Result<()> {
        let draft = self.0.join(format!("draft-{what}"));
        fs::write(&draft, format!("{lock}\n{owner}\n"))?;
        fs::rename(draft, self.file("given", what))
    }

    fn file(&self, state: &str, what: &str) -> PathBuf {
        self.0.join(format!("{state}-{what}"))
    }

    /// Takes any hold. Returns `None` if there is none.
    pub(crate) fn take(&self) -> Option<Given> {
        fs::read_dir(&self.0).ok()?.flatten().find_map(|entry| {
            let what = entry
                .file_name()
                .to_str()?
                .strip_prefix("given-")?
                .to_owned();
            let taken = self.file("taken", &what);
            // if several processes try, one of them succeeds
            fs::rename(entry.path(), &taken).ok()?;
            let text = fs::read_to_string(&taken).ok()?;
            let (lock, owner) = text.trim_end().split_once('\n')?;
            let owner = owner.parse().or_else(|_| OwnerId::from_value(owner)).ok()?;
            Some(Given {
                what: what.clone(),
                lock: lock.to_owned(),
                owner,
                done: self.file("done", &what),
            })
        })
    }

    /// Returns `true` if the hold was released.
    fn is_done(&self, what: &str) -> bool {
        self.file("done", what).exists()
    }

    fn tidy(&self, what: &str) {
        for state in ["given", "taken", "done"] {
            // not all of these files exist
            let _ = fs::remove_file(self.file(state, what));
        }
    }
}

/// Releases a hold that another task left to its lease. It repeats the release until the server has
/// replied.
pub(crate) async fn release(
    history: &History,
    choice: &Choice,
    given: &Given,
    op: &str,
    task: &str,
) {
    let mut tries = 0;
    loop {
        tries += 1;
        history.write(format_args!("take {op} {} {task}", given.what));
        let outcome = choice.lock.release(&given.owner).await;
        // after a retry, it is unknown which request released the hold
        let again = if tries > 1 { "/again" } else { "" };
        history.write(format_args!("taken {op} {}{again}", result(&outcome)));
        if matches!(outcome, Ok(()) | Err(Error::NotHeld { .. })) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let _ = fs::write(&given.done, "");
}

/// Releases a hold that this task left to its lease, if no other task has done so in time.
pub(crate) async fn look_after(
    history: Arc<History>,
    mailbox: Mailbox,
    choice: Choice,
    what: String,
    owner: OwnerId,
) {
    let until = now() + PATIENCE;
    while now() < until && !mailbox.is_done(&what) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    if !mailbox.is_done(&what) {
        let given = Given {
            what: what.clone(),
            lock: String::new(),
            owner,
            done: mailbox.file("done", &what),
        };
        // no number: this is not an operation of a task
        release(&history, &choice, &given, "-", "giver").await;
    }
    mailbox.tidy(&what);
}

/// Returns a result as one word.
pub(crate) fn result<T>(outcome: &Result<T, Error>) -> String {
    match outcome {
        Ok(_) => "Ok".to_owned(),
        Err(error) => name(error),
    }
}

/// Returns the name of an error, and of its reason.
pub(crate) fn name(error: &Error) -> String {
    match error {
        Error::Lost { reason, .. } => format!("Lost/{reason:?}"),
        Error::Store { source, .. } => format!("Store/{:?}", source.kind()),
        Error::Unconfirmed { source, .. } => format!("Unconfirmed/{:?}", source.kind()),
        Error::NotHeld { .. } => "NotHeld".to_owned(),
        other => {
            let debug = format!("{other:?}");
            word(debug.split([' ', '{', '(']).next().unwrap_or("-"))
        }
    }
}

/// Returns the folder of a run's mailbox.
pub(crate) fn folder(run: &Path) -> PathBuf {
    run.join("given")
}
