//! What the command began, whichever process group, session or parent that has now. On Linux a subreaper adopts all of it; elsewhere
//! only the command's process group is known.

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

/// The command, or a process that it began, directly or not.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) pid: Pid,
    pub(crate) name: String,
    /// It belongs to another user: no signal reaches it.
    pub(crate) is_refused: bool,
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, name, is_refused } = self;
        let why =
            if *is_refused { "it runs as another user" } else { "it got SIGKILL, and the kernel has not ended it yet" };
        write!(f, "process {pid} ({name}) cannot be ended: {why}")
    }
}

/// The exit code of a guard that has itself ended all that was below it.
pub(crate) const ENDED_ALL: u8 = 1;

/// Whether a guard that ended like this may have left something of the command: it was killed, or failed.
pub(crate) fn may_leave_some(end: End) -> bool {
    !matches!(end, End::Exit(0 | ENDED_ALL))
}

/// After how long what was killed is looked for again. Each time twice as long, while it is the same.
const AGAIN: Duration = Duration::from_millis(1);
/// What that comes to at last: for what cannot be ended yet.
pub(crate) const AT_LAST: Duration = Duration::from_millis(500);
/// How long a guard has to end when nothing is below it any more.
const ALONE: Duration = Duration::from_millis(100);
/// How long the kernel has to end what got SIGKILL.
const KILLED: Duration = Duration::from_secs(2);

/// How often, and for how long, it is tried to end what is left.
#[derive(Debug)]
pub(crate) struct Tries {
    seen: HashSet<Pid>,
    /// The last one, which a signal may have cut short, and when it began.
    pause: Duration,
    since: Instant,
    /// In all before that.
    paused: Duration,
}

impl Default for Tries {
    fn default() -> Self {
        Self { seen: HashSet::new(), pause: Duration::ZERO, since: Instant::now(), paused: Duration::ZERO }
    }
}

impl Tries {
    /// How long to wait after one that left these.
    pub(crate) fn pause(&mut self, left: &[Member]) -> Duration {
        self.paused = self.paused();
        let is_same = left.iter().filter(|member| self.seen.insert(member.pid)).count() == 0;
        // what begins others and ends is not caught by waiting
        self.pause = if is_same { (self.pause * 2).clamp(AGAIN, AT_LAST) } else { AGAIN };
        self.since = Instant::now();
        self.pause
    }

    /// How long it was waited. That this program stood still does not count.
    fn paused(&self) -> Duration {
        self.paused + self.since.elapsed().min(self.pause)
    }

    /// Whether a guard that still has nothing below it does not end by itself.
    fn keepers_hang(&self) -> bool {
        self.paused() >= ALONE
    }

    /// Whether the kernel had time to end all of them.
    pub(crate) fn for_long(&self) -> bool {
        self.paused() >= KILLED
    }
}

/// Those that cannot be ended, when they were told to `for_long`, or all that are left cannot.
pub(crate) fn unended(left: &[Member], for_long: bool) -> &[Member] {
    if for_long || left.iter().all(|member| member.is_refused) { left } else { &[] }
}

/// All that is below this process, from now on. It alone reaps, so that all that is known of a number goes with the process.
#[derive(Debug)]
pub(crate) struct Family {
    known: Known,
    /// What has happened and was not asked for yet: the kernel tells each only once.
    news: Vec<Event>,
}

#[derive(Debug)]
enum Known {
    #[cfg(target_os = "linux")]
    Tree(tree::Tree),
    /// The command's process group is all that can be found.
    Group(Option<Pid>),
}

impl Family {
    pub(crate) fn begin() -> io::Result<Self> {
        #[cfg(target_os = "linux")]
        {
            nix::sys::prctl::set_child_subreaper(true)?;
            if let Some(tree) = tree::Tree::begin() {
                return Ok(Self { known: Known::Tree(tree), news: Vec::new() });
            }
        }
        Ok(Self { known: Known::Group(None), news: Vec::new() })
    }

    /// Linux has lists of what is below this process, but they are not to be read.
    pub(crate) fn is_blind(&self) -> bool {
        cfg!(target_os = "linux") && matches!(self.known, Known::Group(_))
    }

    /// A process between this one and the command.
    #[cfg_attr(not(target_os = "linux"), expect(unused_variables, reason = "nothing finds what it has"))]
    pub(crate) fn keeper(&mut self, pid: Pid) {
        match &mut self.known {
            #[cfg(target_os = "linux")]
            Known::Tree(tree) => tree.keeper(pid),
            Known::Group(_) => {}
        }
    }

    /// It leads a process group of its own.
    pub(crate) fn command(&mut self, pid: Pid) {
        match &mut self.known {
            #[cfg(target_os = "linux")]
            Known::Tree(tree) => tree.command = Some(pid),
            Known::Group(group) => *group = Some(pid),
        }
    }

    /// Where a guard has reaped it.
    pub(crate) fn command_ended(&mut self) {
        match &mut self.known {
            #[cfg(target_os = "linux")]
            Known::Tree(tree) => tree.command = None,
            // what it left behind is in that group
            Known::Group(_) => {}
        }
    }

    /// What has happened to children since this was asked last. What has ended is reaped.
    pub(crate) fn news(&mut self) -> io::Result<Vec<Event>> {
        match &mut self.known {
            #[cfg(target_os = "linux")]
            Known::Tree(tree) => drop(tree.reap(&mut self.news)?),
            Known::Group(_) => wait::news(&mut self.news)?,
        }
        Ok(std::mem::take(&mut self.news))
    }

    /// Whether this is the command, or one that it began.
    pub(crate) fn has(&self, pid: Pid) -> bool {
        match &self.known {
            #[cfg(target_os = "linux")]
            Known::Tree(tree) => tree.has(pid),
            Known::Group(group) => *group == Some(pid),
        }
    }

    /// Whether there is anything that no keeper but this process has.
    pub(crate) fn has_any(&self) -> bool {
        match &self.known {
            #[cfg(target_os = "linux")]
            Known::Tree(tree) => tree.has_any(),
            Known::Group(_) if cfg!(target_os = "linux") => wait::has_children(),
            Known::Group(group) => group.is_some_and(|group| killpg(group, None) != Err(Errno::ESRCH)),
        }
    }

    /// Sends it to those whose parent has ended, and to all of their process groups. The groups that `skip` names have had it.
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

    /// Ends all of them: those that were still there. Again, until there are none. The keepers that do not end by themselves are
    /// ended, too, where nothing is left for them to adopt: one that is killed tells nothing more.
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

    /// How often it is looked whether more have been begun while the others were stopped.
    const LOOKS: u32 = 16;

    /// Of the kernel's flags of a process, in its `include/linux/sched.h`.
    const PF_EXITING: u32 = 4;

    /// What is found by the lists in `/proc`.
    #[derive(Debug)]
    pub(crate) struct Tree {
        /// Those that adopt, and end last: this process first.
        keepers: Vec<Pid>,
        /// The children that this process had before, and has still.
        others: HashSet<Pid>,
        /// Whether what the command leaves behind comes to this process: there is no guard between them, or one was lost.
        adopts: bool,
        /// While it runs.
        pub(super) command: Option<Pid>,
    }

    /// One of them, and who had it when it was found.
    #[derive(Debug, Clone, Copy)]
    struct Found {
        pid: Pid,
        parent: Pid,
    }

    impl Tree {
        /// `None`: the `/proc` here is that of other processes.
        pub(super) fn begin() -> Option<Self> {
            let own = getpid();
            let said = fs::read_link("/proc/self").ok().and_then(|said| pid(said.to_str()?));
            let others = || Lists::look().children(own).into_iter().collect();
            (said == Some(own)).then(|| Self { keepers: vec![own], others: others(), adopts: true, command: None })
        }

        pub(super) fn keeper(&mut self, pid: Pid) {
            self.keepers.push(pid);
            self.adopts = false;
        }

        /// Knows what has come to this process from elsewhere, before it ends the first guard itself.
        fn know_others(&mut self) {
            let Some(guard) = self.keepers.get(1).filter(|_| !self.adopts) else { return };
            let here = Lists::look().children(self.keepers[0]);
            // what others may have killed meanwhile adopts nothing more: some of these may be the command's
            if Stat::of(*guard).is_some_and(|stat| !stat.is_exiting) {
                self.others.extend(here.into_iter().filter(|pid| pid != guard));
            }
        }

        /// Reaps what has ended, and forgets it. Returns the numbers, which others may have next.
        pub(super) fn reap(&mut self, news: &mut Vec<Event>) -> io::Result<Vec<Pid>> {
            let before = news.len();
            let reaped = wait::news(news);
            let end = |event: &Event| if let Event::Ended(pid, end) = event { Some((*pid, *end)) } else { None };
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
            // a child that ends while the list is read may hide another one
            (0..2).any(|_| self.all().iter().any(|found| Stat::of_living(*found).is_some()))
        }

        pub(super) fn tell(&self, signal: Signal, skip: impl Fn(Pid, Pid) -> bool) -> Vec<Pid> {
            let lists = Lists::look();
            let orphans = self.keepers.iter().flat_map(|parent| {
                self.children(&lists, *parent).map(|pid| Found { pid, parent: *parent }).collect::<Vec<_>>()
            });
            let groups: HashSet<Pid> = orphans
                .filter(|found| !self.keepers.contains(&found.pid))
                .filter_map(|found| Stat::of_living(found).map(|stat| (found.pid, stat.group)))
                .filter(|(pid, group)| !skip(*pid, *group))
                .map(|(_, group)| group)
                .collect();
            // not all are looked at each time: there may be thousands
            if groups.is_empty() {
                return Vec::new();
            }
            let all = self.all();
            let family = self.with_keepers(&all);
            let told = all.iter().filter(|found| {
                Stat::of_living(**found)
                    .is_some_and(|stat| groups.contains(&stat.group) && !skip(found.pid, stat.group))
            });
            told.map(|found| {
                let _ = send(*found, signal, &family);
                found.pid
            })
            .collect()
        }

        pub(super) fn end(&mut self, tries: &Tries, news: &mut Vec<Event>) -> Vec<Member> {
            if let Some(command) = self.command {
                // at once, however many they are, and however busy they keep the machine
                let _ = killpg(command, Signal::SIGSTOP);
            }
            let (mut all, mut family) = (Vec::<Found>::new(), self.with_keepers(&[]));
            // stopped first, each before its children are looked for: none begins more, or sees another one end and goes on
            for _ in 0..LOOKS {
                // a chain of fork and exit is faster than the looking
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
            let kill = |found: &Found| {
                let (stat, sent) = send(*found, Signal::SIGKILL, &family)?;
                Some(Member { pid: found.pid, name: stat.name, is_refused: sent == Err(Errno::EPERM) })
            };
            let mut left: Vec<Member> = all.iter().rev().filter_map(kill).collect();
            if left.is_empty() && tries.keepers_hang() {
                self.know_others();
                let pairs = self.keepers.windows(2).rev();
                left.extend(pairs.filter_map(|pair| kill(&Found { pid: pair[1], parent: pair[0] })));
            }
            left
        }

        fn with_keepers(&self, all: &[Found]) -> HashSet<Pid> {
            all.iter().map(|found| found.pid).chain(self.keepers.iter().copied()).collect()
        }

        fn all(&self) -> Vec<Found> {
            let mut all = Vec::new();
            self.walk(|found| all.push(found));
            all.retain(|found| !self.keepers.contains(&found.pid));
            all
        }

        /// The children that are of the family, or keepers of it.
        fn children(&self, lists: &Lists, parent: Pid) -> impl Iterator<Item = Pid> {
            // of what the command did not begin some may come to this process, too
            let is_here = move |pid: &Pid| {
                if self.adopts { !self.others.contains(pid) } else { self.keepers.get(1) == Some(pid) }
            };
            let is_own = parent == self.keepers[0];
            lists.children(parent).into_iter().filter(move |pid| !is_own || is_here(pid))
        }

        /// Parents before children.
        fn walk(&self, mut sees: impl FnMut(Found)) {
            let lists = Lists::look();
            let mut known = HashSet::new();
            let mut parents = vec![self.keepers[0]];
            let mut at = 0;
            while let Some(parent) = parents.get(at).copied() {
                for pid in self.children(&lists, parent) {
                    // what is adopted meanwhile has two parents
                    if known.insert(pid) {
                        sees(Found { pid, parent });
                        parents.push(pid);
                    }
                }
                at += 1;
            }
        }
    }

    struct Stat {
        name: String,
        /// The kernel has begun to end it, and gives what it would adopt to the next one above it.
        is_exiting: bool,
        has_ended: bool,
        parent: Pid,
        group: Pid,
    }

    impl Stat {
        fn of(pid: Pid) -> Option<Self> {
            let text = fs::read(format!("/proc/{pid}/stat")).ok()?;
            let text = String::from_utf8_lossy(&text);
            // the name may be anything
            let (head, rest) = text.rsplit_once(") ")?;
            let mut words = rest.split(' ');
            // of a process whose first thread has ended, the others may be at work; only threads that are not ended are listed
            let others = || fs::read_dir(format!("/proc/{pid}/task")).is_ok_and(|threads| threads.count() > 1);
            let has_ended = matches!(words.next()?, "Z" | "X") && !others();
            let mut number = || words.next()?.parse().ok();
            let (parent, group) = (Pid::from_raw(number()?), Pid::from_raw(number()?));
            // session, terminal, its foreground
            let flags: u32 = words.nth(3)?.parse().ok()?;
            let (name, is_exiting) = (head.split_once(" (")?.1.to_owned(), flags & PF_EXITING != 0);
            Some(Self { name, is_exiting, has_ended, parent, group })
        }

        /// `None`: it has ended, or is another's by now. Of what `/proc` hides is known no more than that it is there.
        fn of_living(found: Found) -> Option<Self> {
            let Found { pid, parent } = found;
            let is_there = || kill(pid, None) != Err(Errno::ESRCH) && Lists::look().children(parent).contains(&pid);
            let hidden =
                || Self { name: "hidden by /proc".to_owned(), is_exiting: false, has_ended: false, parent, group: pid };
            let stat = Self::of(pid).or_else(|| is_there().then(hidden));
            stat.filter(|stat| !stat.has_ended)
        }
    }

    /// `None`: it has ended, or is another one by now.
    fn send(found: Found, signal: Signal, family: &HashSet<Pid>) -> Option<(Stat, Result<(), Errno>)> {
        let pid = found.pid;
        let opened = process::pidfd_open(process::Pid::from_raw(pid.as_raw())?, PidfdFlags::empty());
        // after it was opened: what it stands for is of this family
        let stat = Stat::of_living(found).filter(|stat| family.contains(&stat.parent))?;
        let sent = match (opened, process::Signal::from_named_raw(signal as i32)) {
            (Ok(process), Some(signal)) => {
                process::pidfd_send_signal(&process, signal).map_err(|error| Errno::from_raw(error.raw_os_error()))
            }
            (Err(rustix::io::Errno::SRCH), _) => return None,
            // before Linux 5.3, or in a sandbox that knows no such call
            _ => kill(pid, signal),
        };
        (sent != Err(Errno::ESRCH)).then_some((stat, sent))
    }

    /// Who is whose child.
    enum Lists {
        /// The kernel says it of each process.
        Kernel,
        /// As it was when it was looked at.
        ByParent(HashMap<Pid, Vec<Pid>>),
    }

    impl Lists {
        fn look() -> Self {
            let are_there = fs::exists("/proc/thread-self/children").is_ok_and(|are_there| are_there);
            if are_there { Self::Kernel } else { Self::by_parent() }
        }

        fn children(&self, parent: Pid) -> Vec<Pid> {
            match self {
                Self::Kernel => {
                    let threads = fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten().flatten();
                    let lists = threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
                    lists.flat_map(|list| list.split_whitespace().filter_map(pid).collect::<Vec<_>>()).collect()
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
            let found = Found { pid: Pid::from_raw(child.id().cast_signed()), parent: getpid() };
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
        // nor does a sleep count for more than was to be waited
        assert!(tries.pause(&[]) == AT_LAST);
        tries.since = Instant::now().checked_sub(Duration::from_secs(60)).unwrap();
        assert!(tries.keepers_hang() && !tries.for_long());
    }
}
