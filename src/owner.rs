//! The owner of a lock: the client, and within it the task.
//!
//! An owner prints as `<client uuid>:<task>`, which is the field of the lock record. The task part
//! depends on where the call is made:
//!
//! - inside `tokio::spawn`: the task id, `42`
//! - outside of any tokio task (see below): the thread, `b1`
//! - inside [`OwnerId::scope`]: a fresh number, `s7`
//! - by [`LockClient::owner`](crate::LockClient::owner): your name, `x/job-9`
//!
//! The four cannot collide. After a request whose outcome is unknown, the client adds a suffix
//! (`42.1`), so that a late execution of the old request uses a name that is no longer in use.
//!
//! **Branches of one `join!`, `select!` or `FuturesUnordered` are one task**, hence one owner: they
//! re-enter each other's lock. Use `tokio::spawn` or [`OwnerId::scope`] if branches must exclude
//! each other.
//!
//! Outside of tokio tasks, only the thread distinguishes callers. A `block_on` body has its thread
//! to itself; a task of another executor does not, and cannot be rejected, since it looks the same
//! as a `block_on` body. A waker does not distinguish them either: the branches of one body need
//! not share a waker, and addresses of wakers are reused.

mod checked;

use std::{
    borrow::Cow,
    cell::Cell,
    fmt,
    io::Write,
    num::NonZeroU8,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use smallvec::SmallVec;
use uuid::Uuid;

/// The task part of a placeholder, which owns a hold during a hand-over.
const PLACEHOLDER: &str = "handed-over";
/// The longest application or host in a connection name, in characters.
const MAX_NAME_PART: usize = 64;

tokio::task_local! {
    static SCOPE: Scope;
}

/// The owner that a scope names.
#[derive(Clone, Copy)]
struct Scope {
    number: u64,
    /// It belongs to one acquire.
    is_single: bool,
}

/// Returns the number behind `b` and `s`: counted per process, and never reused.
fn fresh_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Returns the length as a `u32`, which keeps owners small: each waiter has one.
fn length(text: &str) -> u32 {
    u32::try_from(text.len()).unwrap_or(u32::MAX)
}

fn thread_number() -> u64 {
    thread_local!(static NUMBER: Cell<u64> = const { Cell::new(0) });
    NUMBER.with(|number| {
        if number.get() == 0 {
            number.set(fresh_number());
        }
        number.get()
    })
}

/// The identity of one client: a random UUID, new for each [`LockClient`](crate::LockClient) that
/// is created.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct ClientId(Arc<str>);

impl ClientId {
    pub(crate) fn random() -> Self {
        Self(Uuid::new_v4().to_string().into())
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

/// Returns the name of a client's connections, `nestlock:<application>:<host>:<process>:<client>`.
/// Readers parse it from the right.
pub(crate) fn connection_name(application: Option<&str>, client: &ClientId) -> String {
    let of_executable = || {
        let path = std::env::current_exe().ok()?;
        Some(path.file_stem()?.to_string_lossy().into_owned())
    };
    let application = application
        .map(str::to_owned)
        .or_else(of_executable)
        .unwrap_or_default();
    let part = |text: &str| {
        // the server rejects other characters in a name, and `:` is the separator
        let plain = |letter| {
            if letter == ':' || !char::is_ascii_graphic(&letter) {
                '-'
            } else {
                letter
            }
        };
        let text: String = text.chars().map(plain).take(MAX_NAME_PART).collect();
        if text.is_empty() {
            "-".to_owned()
        } else {
            text
        }
    };
    format!(
        "nestlock:{}:{}:{}:{}",
        part(&application),
        part(&host()),
        std::process::id(),
        client.as_str()
    )
}

#[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
fn host() -> String {
    nix::unistd::gethostname()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default()
}

#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
fn host() -> String {
    std::env::var("HOSTNAME")
        .or_else(|_| std::env::var("COMPUTERNAME"))
        .unwrap_or_default()
}

/// The owner of a lock, as in the lock record: `<client uuid>:<task>`.
///
/// By default the owner is the caller: the [scope](Self::scope), otherwise the tokio task,
/// otherwise the thread, which is right in the body of `#[tokio::main]` and `block_on`.
///
/// # On executors other than tokio's
///
/// Their tasks (smol's, async-std's, those of `LocalPool`) have no visible id: **tasks that one
/// thread polls in turn are one owner, and hold the lock together**; a task that moves to another
/// thread is another owner there, and waits for itself. Give each of them a scope where you spawn
/// it:
///
/// ```no_run
/// # fn spawn(_: impl Future<Output = ()>) {}
/// use nestlock::OwnerId;
///
/// spawn(OwnerId::scope(async {
///     // its locks are its own, on any thread
/// }));
/// ```
#[derive(Clone)]
pub struct OwnerId {
    /// The text in the record.
    text: Arc<str>,
    /// Where the suffix begins that is added after an unknown outcome; the length of `text` if
    /// there is none.
    base: u32,
    /// Whether the user chose the text, which then never gets a suffix.
    is_value: bool,
    /// Whether it is the exact name in one record, rather than a task or a named owner under any
    /// suffix.
    is_exact: bool,
    /// For the owner of one acquire: which of the record's holders this is, from 1, since a hold
    /// may be handed off to the owner of another acquire, and keeps its name. 0 for other owners.
    turn: u8,
}

impl OwnerId {
    fn new(client: &ClientId, task: fmt::Arguments<'_>) -> Self {
        // on the stack, since each acquire makes one; only the longest names use the heap
        let mut text = SmallVec::<[u8; 80]>::new();
        // a write to memory cannot fail
        let _ = write!(text, "{}:{task}", client.as_str());
        let text = std::str::from_utf8(&text)
            .map_or_else(|_| String::from_utf8_lossy(&text), Cow::Borrowed);
        Self {
            base: length(&text),
            text: (&*text).into(),
            is_value: false,
            is_exact: false,
            turn: 0,
        }
    }

    /// Returns the caller: the scope, otherwise the task, otherwise the thread.
    pub(crate) fn current(client: &ClientId) -> Self {
        if let Ok(Scope { number, is_single }) = SCOPE.try_with(|scope| *scope) {
            return Self {
                turn: is_single.into(),
                ..Self::new(client, format_args!("s{number}"))
            };
        }
        match tokio::task::try_id() {
            Some(task) => Self::new(client, format_args!("{task}")),
            None => Self::new(client, format_args!("b{}", thread_number())),
        }
    }

    /// Returns a new placeholder, which owns a hold during a hand-over.
    pub(crate) fn placeholder() -> Self {
        let mut owner = Self::new(&ClientId::random(), format_args!("{PLACEHOLDER}"));
        owner.is_exact = true;
        owner
    }

    /// Returns whether this is a placeholder from [`OwnerId::placeholder`].
    pub(crate) fn is_placeholder(&self) -> bool {
        self.as_str()
            .split_once(':')
            .is_some_and(|(_, task)| task == PLACEHOLDER)
    }

    /// Returns the same owner under a name that no earlier request has used. Number 0 is the name
    /// without a suffix. A value keeps its text.
    pub(crate) fn with_suffix(&self, number: u64) -> Self {
        let text = match number {
            _ if self.is_value => Arc::clone(&self.text),
            0 if self.base() == &*self.text => Arc::clone(&self.text),
            0 => self.base().into(),
            _ => format!("{}.{number}", self.base()).into(),
        };
        Self {
            text,
            base: length(self.base()),
            is_exact: true,
            ..*self
        }
    }

    /// Returns the same name for the next holder of the record.
    pub(crate) fn next_turn(&self) -> Self {
        Self {
            text: Arc::clone(&self.text),
            turn: self.turn.saturating_add(1),
            ..*self
        }
    }

    /// Returns which of the record's holders this is, if it is the owner of one acquire.
    pub(crate) fn turn(&self) -> Option<NonZeroU8> {
        NonZeroU8::new(self.turn)
    }

    /// Returns whether a caller that has this name means the hold of `held`. A name that was read
    /// from a record means its present holder.
    pub(crate) fn means(&self, held: &Self) -> bool {
        !self.is_exact || self == held && (self.turn == 0 || self.turn == held.turn)
    }

    /// Returns whether [`OwnerId::with_suffix`] with this number returns this name.
    pub(crate) fn has_suffix(&self, number: u64) -> bool {
        let suffix = &self.text[self.base as usize..];
        // only suffixes as this client writes them: a name from a record may end in `.07`
        let is_written = |suffix: &str| suffix.starts_with(|digit| ('1'..='9').contains(&digit));
        let is_it = || match suffix.strip_prefix('.') {
            Some(suffix) => is_written(suffix) && suffix.parse() == Ok(number),
            None => number == 0,
        };
        self.is_exact && (self.is_value || is_it())
    }

    /// Returns whether this is a text that the user chose, rather than a task of a client.
    pub(crate) fn is_value(&self) -> bool {
        self.is_value
    }

    /// Returns the name without the suffix that an unknown outcome adds.
    pub(crate) fn base(&self) -> &str {
        &self.text[..self.base as usize]
    }

    /// Returns whether it is the exact name in one record, rather than a task or a named owner
    /// under any suffix.
    pub(crate) fn is_exact(&self) -> bool {
        self.is_exact
    }

    pub(crate) fn is_of(&self, client: &ClientId) -> bool {
        self.text
            .strip_prefix(client.as_str())
            .is_some_and(|rest| rest.starts_with(':'))
    }

    /// Returns the owner as it is in the lock record.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    pub(crate) fn to_arc(&self) -> Arc<str> {
        Arc::clone(&self.text)
    }

    /// Runs `future` as a separate owner, different from the surrounding task and from every other
    /// scope.
    ///
    /// Use it for a branch of a `join!` or `select!`: branches share the task, and would re-enter
    /// each other's lock. Use it also for each task of an executor other than tokio's, where tasks
    /// share the thread. It needs no runtime.
    ///
    /// # Cancel safety
    ///
    /// As cancel safe as `future`.
    pub async fn scope<F: Future>(future: F) -> F::Output {
        Self::as_owner(false, future).await
    }

    /// Runs `future`, which makes one acquire, as an owner that no other acquire has.
    pub(crate) async fn of_one_acquire<F: Future>(future: F) -> F::Output {
        Self::as_owner(true, future).await
    }

    fn as_owner<F: Future>(is_single: bool, future: F) -> impl Future<Output = F::Output> {
        let number = fresh_number();
        SCOPE.scope(Scope { number, is_single }, future)
    }
}

impl OwnerId {
    /// Reads an owner from a record, which other clients of the format may have written: any text
    /// is an owner.
    pub(crate) fn recorded(text: &str) -> Self {
        text.parse().unwrap_or_else(|_| Self {
            text: text.into(),
            base: length(text),
            is_value: true,
            is_exact: true,
            turn: 0,
        })
    }
}

impl PartialEq for OwnerId {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

impl Eq for OwnerId {}

impl std::hash::Hash for OwnerId {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.as_str().hash(state);
    }
}

impl fmt::Display for OwnerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for OwnerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OwnerId({})", self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_suffix_changes_the_name_and_keeps_the_base() {
        let owner = OwnerId::named(&ClientId::random(), "job-1").unwrap();
        let later = owner.with_suffix(3);
        assert_eq!(later.as_str(), format!("{owner}.3"));
        assert_eq!(later.base(), owner.base());
        assert_eq!(later.with_suffix(0), owner);
        assert!(later.has_suffix(3) && !later.has_suffix(0) && later.with_suffix(0).has_suffix(0));
        // a name that is not in a record yet, and names that others may have written
        assert!(!owner.has_suffix(0));
        let read = |suffix: &str| format!("{owner}{suffix}").parse::<OwnerId>().unwrap();
        for other in [".03", ".+3", ".3.3", ".", ".18446744073709551616"].map(read) {
            assert!(
                ![0, 3].iter().any(|number| other.has_suffix(*number)),
                "{other}"
            );
        }
        let value = OwnerId::from_value("job.3").unwrap();
        assert!(value.has_suffix(4), "it has no other name");
    }

    /// Each holder of one record has the same text, and means its own hold only.
    #[tokio::test]
    async fn a_name_means_the_hold_of_its_own_turn() {
        let client = ClientId::random();
        let caller = OwnerId::of_one_acquire(async { OwnerId::current(&client) }).await;
        let first = caller.with_suffix(0);
        let second = first.next_turn();
        assert_eq!(first, second);
        assert!(first.means(&first) && second.means(&second));
        assert!(!first.means(&second) && !second.means(&first));
        assert!(caller.means(&second), "inside its acquire it has one hold");
        let read = OwnerId::recorded(first.as_str());
        assert!(read.means(&first) && read.means(&second));
        let task = OwnerId::current(&client).with_suffix(0);
        assert!(task.turn().is_none() && task.means(&task));
    }

    #[test]
    fn a_printed_owner_reads_back() {
        let owner = OwnerId::named(&ClientId::random(), "job-1")
            .unwrap()
            .with_suffix(7);
        let read: OwnerId = owner.to_string().parse().unwrap();
        assert_eq!(read, owner);
        assert_eq!(read.base(), owner.base());
        for bad in [
            "",
            "a",
            "a:b",
            "0a1b2c3d-0000-0000-0000-000000000000:",
            "0a1b2c3d-0000-0000-0000-000000000000",
        ] {
            assert!(bad.parse::<OwnerId>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_connection_is_called_by_what_the_server_takes() {
        let client = ClientId::random();
        let name = connection_name(Some("my app: ä\n"), &client);
        let parts: Vec<&str> = name.split(':').collect();
        assert_eq!(parts[..2], ["nestlock", "my-app----"]);
        assert_eq!(
            parts[3..],
            [&*std::process::id().to_string(), client.as_str()]
        );
        assert!(name.bytes().all(|byte| byte.is_ascii_graphic()), "{name}");
        assert!(connection_name(Some(&"x".repeat(999)), &client).len() < 256);
        assert!(
            connection_name(None, &client).starts_with("nestlock:nestlock-"),
            "this executable's"
        );
        assert!(connection_name(Some(""), &client).starts_with("nestlock:-:"));
    }

    #[test]
    fn names_that_could_be_mistaken_are_refused() {
        let client = ClientId::random();
        for bad in ["", "a.1", "a b", "ä", &"x".repeat(129)] {
            assert!(OwnerId::named(&client, bad).is_err(), "{bad:?}");
        }
    }
}
