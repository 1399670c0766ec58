//! What the command began, whichever process group, session or parent that has now. On Linux a subreaper adopts all of it; elsewhere
//! only the command's process group is known.

use std::fmt;

use nix::{sys::signal::Signal, unistd::Pid};

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

/// Those that cannot be ended, when they were told to `for_long`, or all that are left cannot.
pub(crate) fn unended(left: &[Member], for_long: bool) -> &[Member] {
    if for_long || left.iter().all(|member| member.is_refused) { left } else { &[] }
}

#[cfg(target_os = "linux")]
pub(crate) use linux::Family;
#[cfg(not(target_os = "linux"))]
pub(crate) use other::Family;

#[cfg(target_os = "linux")]
mod linux {
    use std::{
        collections::{HashMap, HashSet},
        fs, io,
    };

    use nix::{errno::Errno, sys::signal::kill, unistd::getpid};
    use rustix::process::{self, PidfdFlags};

    use super::{Member, Pid, Signal};

    /// How often it is looked whether more have been begun while the others were stopped.
    const LOOKS: u32 = 16;

    /// All that is below this process, from now on.
    #[derive(Debug)]
    pub(crate) struct Family {
        /// Those that adopt, and end last: this process first.
        keepers: Vec<Pid>,
        /// The children that this process had before.
        others: HashSet<Pid>,
    }

    impl Family {
        pub(crate) fn begin() -> io::Result<Self> {
            nix::sys::prctl::set_child_subreaper(true)?;
            let own = getpid();
            Ok(Self { keepers: vec![own], others: children()(own).into_iter().collect() })
        }

        /// A process between this one and the command.
        pub(crate) fn keeper(&mut self, pid: Pid) {
            self.keepers.push(pid);
        }

        #[expect(clippy::unused_self, reason = "only elsewhere is there a process group to know")]
        pub(crate) fn command(&mut self, _pid: Pid) {}

        /// Whether there is anybody whom no keeper but this process has.
        pub(crate) fn has_any(&self) -> bool {
            // a child that ends while the list is read may hide another one
            (0..2).any(|_| self.all().iter().any(|pid| Stat::of_living(*pid).is_some()))
        }

        /// Sends it to those whose parent has ended, and to all of their process groups. The groups that `skip` names have had it.
        pub(crate) fn tell(&self, signal: Signal, skip: impl Fn(Pid, Pid) -> bool) -> Vec<Pid> {
            let all = self.all();
            let known: Vec<(Pid, Stat)> = all.iter().filter_map(|pid| Some((*pid, Stat::of_living(*pid)?))).collect();
            let is_keeper = |pid: &Pid| self.keepers.contains(pid);
            let groups: HashSet<Pid> =
                known.iter().filter(|(_, stat)| is_keeper(&stat.parent)).map(|(_, stat)| stat.group).collect();
            let family = self.with_keepers(&all);
            known
                .iter()
                .filter(|(pid, stat)| groups.contains(&stat.group) && !is_keeper(pid) && !skip(*pid, stat.group))
                .map(|(pid, _)| {
                    let _ = send(*pid, signal, &family);
                    *pid
                })
                .collect()
        }

        /// Ends all of them: those that were still there. Again, until there are none. The keepers end, too, where nothing is left
        /// for them to adopt.
        pub(crate) fn end(&self) -> Vec<Member> {
            let mut all = Vec::new();
            // stopped first, parents before children: none sees another one end and goes on
            for _ in 0..LOOKS {
                let found = self.all();
                let family = self.with_keepers(&found);
                let new: Vec<Pid> =
                    found.iter().filter(|pid| !all.contains(*pid) && !self.keepers.contains(pid)).copied().collect();
                for pid in &new {
                    let _ = send(*pid, Signal::SIGSTOP, &family);
                }
                all.extend(&new);
                if new.is_empty() {
                    break;
                }
            }
            let family = self.with_keepers(&all);
            let kill = |pid: &Pid| {
                let (stat, sent) = send(*pid, Signal::SIGKILL, &family)?;
                Some(Member { pid: *pid, name: stat.name, is_refused: sent == Err(Errno::EPERM) })
            };
            let mut left: Vec<Member> = all.iter().rev().filter_map(kill).collect();
            if !left.iter().any(|member| member.is_refused) {
                left.extend(self.keepers.iter().skip(1).rev().filter_map(kill));
            }
            left
        }

        fn with_keepers(&self, all: &[Pid]) -> HashSet<Pid> {
            all.iter().chain(&self.keepers).copied().collect()
        }

        /// Parents before children. The children that this process had before, and what is below those, are left out.
        fn all(&self) -> Vec<Pid> {
            let (children, own) = (children(), getpid());
            let mut found: Vec<Pid> = children(own).into_iter().filter(|child| !self.others.contains(child)).collect();
            let mut known: HashSet<Pid> = found.iter().copied().chain([own]).collect();
            let mut at = 0;
            while let Some(parent) = found.get(at) {
                // whoever is adopted meanwhile has two parents
                found.extend(children(*parent).into_iter().filter(|child| known.insert(*child)));
                at += 1;
            }
            found
        }
    }

    /// What `/proc/PID/stat` says of a process.
    struct Stat {
        name: String,
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
            let mut number = || words.next()?.parse().ok().map(Pid::from_raw);
            Some(Self { name: head.split_once(" (")?.1.to_owned(), has_ended, parent: number()?, group: number()? })
        }

        /// `None`: it has ended. Of another user's it may not say more than that it is there.
        fn of_living(pid: Pid) -> Option<Self> {
            let hidden = || Self { name: "another user's".to_owned(), has_ended: false, parent: getpid(), group: pid };
            let stat = Self::of(pid).or_else(|| (kill(pid, None) == Err(Errno::EPERM)).then(hidden));
            stat.filter(|stat| !stat.has_ended)
        }
    }

    /// `None`: it has ended, or is another one by now.
    fn send(pid: Pid, signal: Signal, family: &HashSet<Pid>) -> Option<(Stat, Result<(), Errno>)> {
        let opened = process::pidfd_open(process::Pid::from_raw(pid.as_raw())?, PidfdFlags::empty());
        // after it was opened: what it stands for is of this family
        let stat = Stat::of_living(pid).filter(|stat| family.contains(&stat.parent))?;
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

    /// Finds the children of a process: whoever asks has none where `/proc` is that of other processes.
    fn children() -> Box<dyn Fn(Pid) -> Vec<Pid>> {
        let own = getpid();
        if fs::read_link("/proc/self").ok().and_then(|own| own.to_str()?.parse().ok()) != Some(own.as_raw()) {
            return Box::new(|_| Vec::new());
        }
        if fs::exists("/proc/thread-self/children").is_ok_and(|is_there| is_there) {
            Box::new(listed)
        } else {
            let all = by_parent();
            Box::new(move |parent| all.get(&parent).cloned().unwrap_or_default())
        }
    }

    fn listed(parent: Pid) -> Vec<Pid> {
        let threads = fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten().flatten();
        let lists = threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
        lists.flat_map(|list| list.split_whitespace().filter_map(pid).collect::<Vec<_>>()).collect()
    }

    /// For a kernel that lists no children.
    fn by_parent() -> HashMap<Pid, Vec<Pid>> {
        let mut all = HashMap::<Pid, Vec<Pid>>::new();
        let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
        for pid in pids.filter_map(|entry| pid(entry.file_name().to_str()?)) {
            if let Some(stat) = Stat::of(pid) {
                all.entry(stat.parent).or_default().push(pid);
            }
        }
        all
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
            let pid = Pid::from_raw(child.id().cast_signed());
            assert!(listed(getpid()).contains(&pid));
            assert!(by_parent()[&getpid()].contains(&pid));
            assert_eq!(Stat::of(pid).unwrap().parent, getpid());
            child.kill().unwrap();
            child.wait().unwrap();
            assert!(Stat::of_living(pid).is_none());
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod other {
    use std::io;

    use nix::{errno::Errno, sys::signal::killpg};

    use super::{Member, Pid, Signal};

    /// The command's process group.
    #[derive(Debug)]
    pub(crate) struct Family(Option<Pid>);

    impl Family {
        #[expect(clippy::unnecessary_wraps, reason = "as on Linux")]
        pub(crate) fn begin() -> io::Result<Self> {
            Ok(Self(None))
        }

        #[expect(clippy::unused_self, reason = "only Linux says what they adopted")]
        pub(crate) fn keeper(&mut self, _pid: Pid) {}

        pub(crate) fn command(&mut self, pid: Pid) {
            self.0 = Some(pid);
        }

        pub(crate) fn has_any(&self) -> bool {
            self.0.is_some_and(|group| killpg(group, None) != Err(Errno::ESRCH))
        }

        pub(crate) fn tell(&self, signal: Signal, skip: impl Fn(Pid, Pid) -> bool) -> Vec<Pid> {
            let told = self.0.filter(|group| !skip(*group, *group));
            if let Some(group) = told {
                let _ = killpg(group, signal);
            }
            told.into_iter().collect()
        }

        pub(crate) fn end(&self) -> Vec<Member> {
            let left = self.0.and_then(|group| match killpg(group, Signal::SIGKILL) {
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
