//! The processes that the command starts, whichever process group, session or parent they have now.
//! On Linux a subreaper adopts all of them; elsewhere only the command's process group is known.

use std::{
    collections::HashSet,
    fmt, io,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    sys::signal::{Signal, killpg},
    unistd::Pid,
};

use crate::wait::{self, End, Event};

/// The command, or a process that it started, directly or indirectly.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) pid: Pid,
    pub(crate) name: String,
    /// It belongs to another user, so no signal reaches it.
    pub(crate) is_refused: bool,
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            pid,
            name,
            is_refused,
        } = self;
        let why = if *is_refused {
            "it runs as another user"
        } else {
            "it got SIGKILL, and the kernel has not ended it yet"
        };
        write!(f, "process {pid} ({name}) cannot be ended: {why}")
    }
}

/// The exit code of a guard that has itself ended everything below it.
pub(crate) const ENDED_ALL: u8 = 1;

/// Returns whether a guard that ended like this may have left processes behind: it was killed, or
/// failed.
pub(crate) fn may_leave_some(end: End) -> bool {
    !matches!(end, End::Exit(0 | ENDED_ALL))
}

/// First pause before the next attempt to end what is left. It doubles while no new process is
/// found.
const AGAIN: Duration = Duration::from_millis(1);
/// Longest pause, for processes that cannot be ended yet.
pub(crate) const AT_LAST: Duration = Duration::from_millis(500);
/// How long a guard has to end after everything below it has ended.
const ALONE: Duration = Duration::from_millis(100);
/// How long the kernel has to end a process that got SIGKILL.
const KILLED: Duration = Duration::from_secs(2);

/// How often, and for how long, ending the remaining processes was tried.
#[derive(Debug)]
pub(crate) struct Tries {
    seen: HashSet<Pid>,
    /// The last pause, which a signal may have cut short, and when it began.
    pause: Duration,
    since: Instant,
    /// The sum of all earlier pauses.
    paused: Duration,
}

impl Default for Tries {
    fn default() -> Self {
        Self {
            seen: HashSet::new(),
            pause: Duration::ZERO,
            since: Instant::now(),
            paused: Duration::ZERO,
        }
    }
}

impl Tries {
    /// Returns how long to wait after an attempt that left these processes.
    pub(crate) fn pause(&mut self, left: &[Member]) -> Duration {
        self.paused = self.paused();
        let is_same = left
            .iter()
            .filter(|member| self.seen.insert(member.pid))
            .count()
            == 0;
        // longer pauses never catch a process that forks and exits
        self.pause = if is_same {
            (self.pause * 2).clamp(AGAIN, AT_LAST)
        } else {
            AGAIN
        };
        self.since = Instant::now();
        self.pause
    }

    /// Returns the total time waited. Time in which this process was suspended does not count.
    fn paused(&self) -> Duration {
        self.paused + self.since.elapsed().min(self.pause)
    }

    /// Returns whether a guard with nothing below it fails to end by itself.
    fn keepers_hang(&self) -> bool {
        self.paused() >= ALONE
    }

    /// Returns whether the kernel had time to end all of them.
    pub(crate) fn for_long(&self) -> bool {
        self.paused() >= KILLED
    }
}

/// Returns the processes that cannot be ended: all that are left if that was tried `for_long`, or
/// if all of them belong to another user.
pub(crate) fn unended(left: &[Member], for_long: bool) -> &[Member] {
    if for_long || left.iter().all(|member| member.is_refused) {
        left
    } else {
        &[]
    }
}

/// All processes below this one, from now on. Nothing else reaps them, so a process ID is dropped
/// as soon as its process is reaped.
#[derive(Debug)]
pub(crate) struct Family {
    known: Known,
    /// Events that were not fetched yet: the kernel reports each only once.
    news: Vec<Event>,
}

#[derive(Debug)]
enum Known {
    #[cfg(target_os = "linux")]
    Tree(tree::Tree),
    /// Only the command's process group can be found.
    Group(Option<Pid>),
}

impl Family {
    pub(crate) fn begin() -> io::Result<Self> {
        #[cfg(target_os = "linux")]
        {
            nix::sys::prctl::set_child_subreaper(true)?;
            if let Some(tree) = tree::Tree::begin() {
                return Ok(Self {
                    known: Known::Tree(tree),
                    news: Vec::new(),
                });
            }
        }
        Ok(Self {
            known: Known::Group(None),
            news: Vec::new(),
        })
    }

    /// Returns whether this is Linux, but its lists of child processes cannot be read.
    pub(crate) fn is_blind(&self) -> bool {
        cfg!(target_os = "linux") && matches!(self.known, Known::Group(_))
    }

    /// Adds a guard, a process between this one and the command.
    #[cfg_attr(
        not(target_os = "linux"),
        expect(unused_variables, reason = "its children cannot be found there")
    )]
    pub(crate) fn keeper(&mut self, pid: Pid) {
        match &mut self.known {
            #[cfg(target_os = "linux")]
            Known::Tree(tree) => tree.keeper(pid),
            Known::Group(_) => {}
        }
    }

    /// Sets the command, which leads a process group of its own.
    pub(crate) fn command(&mut self, pid: Pid) {
        match &mut self.known {
            #[cfg(target_os = "linux")]
            Known::Tree(tree) => tree.command = Some(pid),
            Known::Group(group) => *group = Some(pid),
        }
    }

    /// Notes that a guard has reaped the command.
    pub(crate) fn command_ended(&mut self) {
        match &mut self.known {
            #[cfg(target_os = "linux")]
            Known::Tree(tree) => tree.command = None,
            // the processes that it left behind are in that group
            Known::Group(_) => {}
        }
    }

    /// Returns what has happened to children since the last call. Children that have ended are
    /// reaped.
    pub(crate) fn news(&mut self) -> io::Result<Vec<Event>> {
        match &mut self.known {
            #[cfg(target_os = "linux")]
            Known::Tree(tree) => drop(tree.reap(&mut self.news)?),
            Known::Group(_) => wait::news(&mut self.news)?,
        }
        Ok(std::mem::take(&mut self.news))
    }

    /// Returns whether this is the command, or a process that it started.
    pub(crate) fn has(&self, pid: Pid) -> bool {
        match &self.known {
            #[cfg(target_os = "linux")]
            Known::Tree(tree) => tree.has(pid),
            Known::Group(group) => *group == Some(pid),
        }
    }

    /// Returns whether anything is left below this process, apart from the guards.
    pub(crate) fn has_any(&self) -> bool {
        match &self.known {
            #[cfg(target_os = "linux")]
            Known::Tree(tree) => tree.has_any(),
            Known::Group(_) if cfg!(target_os = "linux") => wait::has_children(),
            Known::Group(group) => {
                group.is_some_and(|group| killpg(group, None) != Err(Errno::ESRCH))
            }
        }
    }

    /// Sends a signal to the processes whose parent has ended, and to all members of their process
    /// groups. Leaves out those that `skip` selects by process ID and group. Returns the processes
    /// that got it.
    pub(crate) fn tell(&self, signal: Signal, skip: impl Fn(Pid, Pid) -> bool) -> Vec<Pid> {
        match &self.known {
            #[cfg(target_os = "linux")]
            Known::Tree(tree) => tree.tell(signal, skip),
            Known::Group(group) => {
                let told = group.filter(|group| !skip(*group, *group));
                if let Some(group) = told {
                    let _ = killpg(group, signal);
                }
                told.into_iter().collect()
            }
        }
    }

    /// Kills all of them, and returns those that were still there. The caller repeats this until
    /// there are none. Guards that do not end by themselves are killed too, but only when nothing
    /// is left for them to adopt: a killed guard reports nothing more.
    pub(crate) fn end(&mut self, tries: &Tries) -> Vec<Member> {
        match &mut self.known {
            #[cfg(target_os = "linux")]
            Known::Tree(tree) => tree.end(tries, &mut self.news),
            Known::Group(group) => {
                let left = group.and_then(|group| match killpg(group, Signal::SIGKILL) {
                    Err(Errno::ESRCH) => None,
                    sent => Some(Member {
                        pid: group,
                        name: "its process group".to_owned(),
                        is_refused: sent == Err(Errno::EPERM),
                    }),
                });
                left.into_iter().collect()
            }
        }
    }
}

#[cfg(target_os = "linux")]
mod tree {
    use std::{collections::HashMap, fs};

    use nix::{
        errno::Errno,
        sys::signal::{kill, killpg},
        unistd::getpid,
    };
    use rustix::process::{self, PidfdFlags};

    use super::{Event, HashSet, Member, Pid, Signal, Tries, io, may_leave_some, wait};

    /// How often the search for processes is repeated, as some may start while others are being
    /// stopped.
    const LOOKS: u32 = 16;

    /// The kernel's flag of a process that is exiting, from its `include/linux/sched.h`.
    const PF_EXITING: u32 = 4;

    /// The processes that the lists in `/proc` show.
    #[derive(Debug)]
    pub(crate) struct Tree {
        /// The processes that adopt orphans, and end last: this process first.
        keepers: Vec<Pid>,
        /// Children of this process that do not belong to the command.
        others: HashSet<Pid>,
        /// Whether this process adopts what the command leaves behind: there is no guard between
        /// them, or a guard was lost.
        adopts: bool,
        /// The command, while it runs.
        pub(super) command: Option<Pid>,
    }

    /// A process, and its parent when it was found.
    #[derive(Debug, Clone, Copy)]
    struct Process {
        pid: Pid,
        parent: Pid,
    }

    impl Tree {
        /// Creates the tree. Returns `None` if `/proc` shows the processes of another namespace.
        pub(super) fn begin() -> Option<Self> {
            let own = getpid();
            let said = fs::read_link("/proc/self")
                .ok()
                .and_then(|said| pid(said.to_str()?));
            let others = || Lists::look().children(own).into_iter().collect();
            (said == Some(own)).then(|| Self {
                keepers: vec![own],
                others: others(),
                adopts: true,
                command: None,
            })
        }

        pub(super) fn keeper(&mut self, pid: Pid) {
            self.keepers.push(pid);
            self.adopts = false;
        }

        /// Records the children that came to this process from elsewhere, before it kills the first
        /// guard.
        fn know_others(&mut self) {
            let Some(guard) = self.keepers.get(1).filter(|_| !self.adopts) else {
                return;
            };
            let here = Lists::look().children(self.keepers[0]);
            // a guard that was killed in the meantime no longer adopts: some of these children may
            // be the command's
            if Stat::of(*guard).is_some_and(|stat| !stat.is_exiting) {
                self.others
                    .extend(here.into_iter().filter(|pid| pid != guard));
            }
        }

        /// Reaps children that have ended, and drops them. Returns their process IDs, which may be
        /// reused.
        pub(super) fn reap(&mut self, news: &mut Vec<Event>) -> io::Result<Vec<Pid>> {
            let before = news.len();
            let reaped = wait::news(news);
            let end = |event: &Event| {
                if let Event::Ended(pid, end) = event {
                    Some((*pid, *end))
                } else {
                    None
                }
            };
            let ended: Vec<_> = news[before..].iter().filter_map(end).collect();
            for (pid, end) in &ended {
                self.others.remove(pid);
                self.command.take_if(|command| command == pid);
                if let Some(at) = self.keepers.iter().position(|keeper| keeper == pid) {
                    self.keepers.truncate(at);
                    self.adopts = may_leave_some(*end);
                }
            }
            reaped.map(|()| ended.into_iter().map(|(pid, _)| pid).collect())
        }

        pub(super) fn has(&self, pid: Pid) -> bool {
            self.all().iter().any(|found| found.pid == pid)
        }

        pub(super) fn has_any(&self) -> bool {
            if self.adopts && self.others.is_empty() {
                return wait::has_children();
            }
            // a child that ends while the list is read may hide another one, so read it twice
            (0..2).any(|_| {
                self.all()
                    .iter()
                    .any(|found| Stat::of_living(*found).is_some())
            })
        }

        pub(super) fn tell(&self, signal: Signal, skip: impl Fn(Pid, Pid) -> bool) -> Vec<Pid> {
            let lists = Lists::look();
            let orphans = self.keepers.iter().flat_map(|parent| {
                self.children(&lists, *parent)
                    .map(|pid| Process {
                        pid,
                        parent: *parent,
                    })
                    .collect::<Vec<_>>()
            });
            let groups: HashSet<Pid> = orphans
                .filter(|found| !self.keepers.contains(&found.pid))
                .filter_map(|found| Stat::of_living(found).map(|stat| (found.pid, stat.group)))
                .filter(|(pid, group)| !skip(*pid, *group))
                .map(|(_, group)| group)
                .collect();
            // do not visit all processes each time: there may be thousands
            if groups.is_empty() {
                return Vec::new();
            }
            let all = self.all();
            let family = self.with_keepers(&all);
            let told = all.iter().filter(|found| {
                Stat::of_living(**found).is_some_and(|stat| {
                    groups.contains(&stat.group) && !skip(found.pid, stat.group)
                })
            });
            told.map(|found| {
                let _ = send(*found, signal, &family);
                found.pid
            })
            .collect()
        }

        pub(super) fn end(&mut self, tries: &Tries, news: &mut Vec<Event>) -> Vec<Member> {
            if let Some(command) = self.command {
                // stops the whole group in one call, however many processes it has and however busy
                // they keep the machine
                let _ = killpg(command, Signal::SIGSTOP);
            }
            let (mut all, mut family) = (Vec::<Process>::new(), self.with_keepers(&[]));
            // stop each process before its children are searched for: it can start no more, and
            // cannot react to the end of another one
            for _ in 0..LOOKS {
                // a chain of fork and exit is faster than the search, so the IDs of ended processes
                // may be reused
                for ended in self.reap(news).unwrap_or_default() {
                    family.remove(&ended);
                }
                let mut has_more = false;
                self.walk(|found| {
                    if family.insert(found.pid) {
                        has_more = true;
                        all.extend(send(found, Signal::SIGSTOP, &family).map(|_| found));
                    }
                });
                if !has_more {
                    break;
                }
            }
            let kill = |found: &Process| {
                let (stat, sent) = send(*found, Signal::SIGKILL, &family)?;
                Some(Member {
                    pid: found.pid,
                    name: stat.name,
                    is_refused: sent == Err(Errno::EPERM),
                })
            };
            let mut left: Vec<Member> = all.iter().rev().filter_map(kill).collect();
            if left.is_empty() && tries.keepers_hang() {
                self.know_others();
                let pairs = self.keepers.windows(2).rev();
                left.extend(pairs.filter_map(|pair| {
                    kill(&Process {
                        pid: pair[1],
                        parent: pair[0],
                    })
                }));
            }
            left
        }

        fn with_keepers(&self, all: &[Process]) -> HashSet<Pid> {
            all.iter()
                .map(|found| found.pid)
                .chain(self.keepers.iter().copied())
                .collect()
        }

        fn all(&self) -> Vec<Process> {
            let mut all = Vec::new();
            self.walk(|found| all.push(found));
            all.retain(|found| !self.keepers.contains(&found.pid));
            all
        }

        /// Returns the children that belong to the command, or are guards.
        fn children(&self, lists: &Lists, parent: Pid) -> impl Iterator<Item = Pid> {
            // this process may also adopt orphans that the command did not start
            let is_here = move |pid: &Pid| {
                if self.adopts {
                    !self.others.contains(pid)
                } else {
                    self.keepers.get(1) == Some(pid)
                }
            };
            let is_own = parent == self.keepers[0];
            lists
                .children(parent)
                .into_iter()
                .filter(move |pid| !is_own || is_here(pid))
        }

        /// Visits all processes, parents before children.
        fn walk(&self, mut sees: impl FnMut(Process)) {
            let lists = Lists::look();
            let mut known = HashSet::new();
            let mut parents = vec![self.keepers[0]];
            let mut at = 0;
            while let Some(parent) = parents.get(at).copied() {
                for pid in self.children(&lists, parent) {
                    // a process that is adopted during the walk has two parents
                    if known.insert(pid) {
                        sees(Process { pid, parent });
                        parents.push(pid);
                    }
                }
                at += 1;
            }
        }
    }

    struct Stat {
        name: String,
        /// The kernel has begun to end it, and passes the orphans that it would adopt to the next
        /// subreaper above it.
        is_exiting: bool,
        has_ended: bool,
        parent: Pid,
        group: Pid,
    }

    impl Stat {
        fn of(pid: Pid) -> Option<Self> {
            let text = fs::read(format!("/proc/{pid}/stat")).ok()?;
            let text = String::from_utf8_lossy(&text);
            // the name may contain anything, so split at the last parenthesis
            let (head, rest) = text.rsplit_once(") ")?;
            let mut words = rest.split(' ');
            // the first thread may have ended while others still run; other threads that have ended
            // are not listed
            let others = || {
                fs::read_dir(format!("/proc/{pid}/task")).is_ok_and(|threads| threads.count() > 1)
            };
            let has_ended = matches!(words.next()?, "Z" | "X") && !others();
            let mut number = || words.next()?.parse().ok();
            let (parent, group) = (Pid::from_raw(number()?), Pid::from_raw(number()?));
            // skip the session, the terminal and its foreground group
            let flags: u32 = words.nth(3)?.parse().ok()?;
            let (name, is_exiting) = (head.split_once(" (")?.1.to_owned(), flags & PF_EXITING != 0);
            Some(Self {
                name,
                is_exiting,
                has_ended,
                parent,
                group,
            })
        }

        /// Returns the state of a process. Returns `None` if it has ended. Of a process that
        /// `/proc` hides, only its existence is known.
        fn of_living(found: Process) -> Option<Self> {
            let Process { pid, parent } = found;
            let is_there = || {
                kill(pid, None) != Err(Errno::ESRCH)
                    && Lists::look().children(parent).contains(&pid)
            };
            let hidden = || Self {
                name: "hidden by /proc".to_owned(),
                is_exiting: false,
                has_ended: false,
                parent,
                group: pid,
            };
            let stat = Self::of(pid).or_else(|| is_there().then(hidden));
            stat.filter(|stat| !stat.has_ended)
        }
    }

    /// Sends a signal. Returns `None` if the process has ended, or its ID belongs to another
    /// process by now.
    fn send(
        found: Process,
        signal: Signal,
        family: &HashSet<Pid>,
    ) -> Option<(Stat, Result<(), Errno>)> {
        let pid = found.pid;
        let opened =
            process::pidfd_open(process::Pid::from_raw(pid.as_raw())?, PidfdFlags::empty());
        // only after the open, so that the descriptor is known to stand for a member of this family
        let stat = Stat::of_living(found).filter(|stat| family.contains(&stat.parent))?;
        let sent = match (opened, process::Signal::from_named_raw(signal as i32)) {
            (Ok(process), Some(signal)) => process::pidfd_send_signal(&process, signal)
                .map_err(|error| Errno::from_raw(error.raw_os_error())),
            (Err(rustix::io::Errno::SRCH), _) => return None,
            // before Linux 5.3, or in a sandbox without this system call
            _ => kill(pid, signal),
        };
        (sent != Err(Errno::ESRCH)).then_some((stat, sent))
    }

    /// The children of each process.
    enum Lists {
        /// The kernel lists them for each process.
        Kernel,
        /// A snapshot of all processes by their parents.
        ByParent(HashMap<Pid, Vec<Pid>>),
    }

    impl Lists {
        fn look() -> Self {
            let are_there =
                fs::exists("/proc/thread-self/children").is_ok_and(|are_there| are_there);
            if are_there {
                Self::Kernel
            } else {
                Self::by_parent()
            }
        }

        fn children(&self, parent: Pid) -> Vec<Pid> {
            match self {
                Self::Kernel => {
                    let threads = fs::read_dir(format!("/proc/{parent}/task"))
                        .into_iter()
                        .flatten()
                        .flatten();
                    let lists = threads.filter_map(|thread| {
                        fs::read_to_string(thread.path().join("children")).ok()
                    });
                    lists
                        .flat_map(|list| {
                            list.split_whitespace().filter_map(pid).collect::<Vec<_>>()
                        })
                        .collect()
                }
                Self::ByParent(all) => all.get(&parent).cloned().unwrap_or_default(),
            }
        }

        fn by_parent() -> Self {
            let mut all = HashMap::<Pid, Vec<Pid>>::new();
            let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
            for pid in pids.filter_map(|entry| pid(entry.file_name().to_str()?)) {
                if let Some(stat) = Stat::of(pid) {
                    all.entry(stat.parent).or_default().push(pid);
                }
            }
            Self::ByParent(all)
        }
    }

    fn pid(word: &str) -> Option<Pid> {
        word.parse().ok().map(Pid::from_raw)
    }

    #[cfg(test)]
    mod tests {
        use std::process::Command;

        use super::*;

        #[test]
        fn children_are_found_with_and_without_the_kernels_lists() {
            let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
            let found = Process {
                pid: Pid::from_raw(child.id().cast_signed()),
                parent: getpid(),
            };
            assert!(Lists::Kernel.children(getpid()).contains(&found.pid));
            assert!(Lists::by_parent().children(getpid()).contains(&found.pid));
            assert_eq!(Stat::of(found.pid).unwrap().parent, getpid());
            child.kill().unwrap();
            child.wait().unwrap();
            assert!(Stat::of_living(found).is_none());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_that_was_cut_short_counts_for_what_it_was() {
        let mut tries = Tries::default();
        for _ in 0..50 {
            tries.pause(&[]);
        }
        assert!(!tries.for_long());
        // a sleep of the machine counts for no more than the pause
        assert!(tries.pause(&[]) == AT_LAST);
        tries.since = Instant::now().checked_sub(Duration::from_secs(60)).unwrap();
        assert!(tries.keepers_hang() && !tries.for_long());
    }
}
