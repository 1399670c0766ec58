//! The table of descriptors: what each number is, its events, and its end.

use std::{
    collections::{BTreeMap, VecDeque},
    ffi::c_int,
};

use libc::{EBADF, ECONNRESET, EINVAL, ENOTSOCK};

/// The first number, which no descriptor of the system has.
pub(super) const FIRST: c_int = 1 << 24;
/// How many bytes a socket accepts before its peer receives them: Linux's `net.core.wmem_default`.
pub(super) const LIMIT: usize = 212_992;

pub(super) const IN: u32 = libc::EPOLLIN as u32;
pub(super) const OUT: u32 = libc::EPOLLOUT as u32;
pub(super) const READ_END: u32 = libc::EPOLLRDHUP as u32;
pub(super) const HUNG_UP: u32 = libc::EPOLLHUP as u32;
const ERROR: u32 = libc::EPOLLERR as u32;

#[derive(Debug, Default)]
pub(super) enum Is {
    #[default]
    Closed,
    /// An index into `Table::epolls`: several numbers may refer to one epoll.
    Epoll(usize),
    /// An eventfd, which is never read. `true`: it was written to.
    Waker(bool),
    Socket(Socket),
}

#[derive(Debug, Default)]
pub(super) struct Socket {
    pub(super) role: Role,
    pub(super) received: VecDeque<u8>,
    /// Nothing more will be received.
    pub(super) is_read_shut: bool,
    /// Nothing more can be sent.
    pub(super) is_write_shut: bool,
    /// Reported once, by `SO_ERROR` or by a receive that finds no bytes.
    pub(super) error: c_int,
}

#[derive(Debug, Default)]
pub(super) enum Role {
    #[default]
    New,
    /// Listens, with the connections that wait to be accepted, without limit.
    Listens(VecDeque<usize>),
    /// Connected to this peer, which may be closed.
    Connected(usize),
}

#[derive(Debug, Default)]
pub(super) struct Descriptor {
    pub(super) is: Is,
    pub(super) watch: Option<Watch>,
}

/// The interest of an epoll in a descriptor. It is edge-triggered: each event is reported once.
#[derive(Debug)]
pub(super) struct Watch {
    pub(super) epoll: usize,
    events: u32,
    pub(super) token: u64,
    /// The descriptor is listed in `Table::epolls`.
    pub(super) is_listed: bool,
}

pub(super) struct Table {
    pub(super) descriptors: Vec<Descriptor>,
    /// For each epoll, the descriptors that may have events, in the order in which these came.
    pub(super) epolls: Vec<VecDeque<usize>>,
    pub(super) paths: BTreeMap<Vec<u8>, usize>,
}

impl Socket {
    pub(super) fn connected(peer: usize) -> Self {
        Self {
            role: Role::Connected(peer),
            ..Self::default()
        }
    }

    pub(super) fn take_error(&mut self) -> c_int {
        std::mem::take(&mut self.error)
    }
}

impl Table {
    pub(super) fn add(&mut self, is: Is) -> usize {
        self.descriptors.push(Descriptor { is, watch: None });
        self.descriptors.len() - 1
    }

    pub(super) fn find(&self, fd: c_int) -> Result<usize, c_int> {
        let at = (fd - FIRST) as usize;
        let is_open = self
            .descriptors
            .get(at)
            .is_some_and(|found| !matches!(found.is, Is::Closed));
        if is_open { Ok(at) } else { Err(EBADF) }
    }

    pub(super) fn socket(&mut self, fd: c_int) -> Result<(usize, &mut Socket), c_int> {
        let at = self.find(fd)?;
        let Is::Socket(socket) = &mut self.descriptors[at].is else {
            return Err(ENOTSOCK);
        };
        Ok((at, socket))
    }

    /// Returns the socket. Returns `None` if it is closed.
    pub(super) fn peer(&mut self, at: usize) -> Option<&mut Socket> {
        if let Is::Socket(socket) = &mut self.descriptors[at].is {
            Some(socket)
        } else {
            None
        }
    }

    pub(super) fn epoll(&self, fd: c_int) -> Result<usize, c_int> {
        if let Is::Epoll(epoll) = self.descriptors[self.find(fd)?].is {
            Ok(epoll)
        } else {
            Err(EINVAL)
        }
    }

    // --- events ---

    /// Returns the current events, of those that are watched.
    pub(super) fn events(&self, at: usize) -> u32 {
        let Descriptor {
            is,
            watch: Some(watch),
        } = &self.descriptors[at]
        else {
            return 0;
        };
        let all = match is {
            Is::Waker(true) => IN,
            Is::Socket(socket) => self.events_of(socket),
            _ => 0,
        };
        all & (watch.events | HUNG_UP | ERROR)
    }

    fn events_of(&self, socket: &Socket) -> u32 {
        let (is_readable, is_writable, is_hung_up) = match &socket.role {
            Role::New => (false, true, true),
            Role::Listens(waiting) => (!waiting.is_empty(), false, false),
            Role::Connected(peer) => {
                // as Linux's `unix_writable`: at most a quarter of the buffer is in use
                let is_writable = match &self.descriptors[*peer].is {
                    Is::Socket(peer) => peer.received.len() <= LIMIT / 4,
                    _ => true,
                };
                (
                    !socket.received.is_empty(),
                    is_writable,
                    socket.is_read_shut && socket.is_write_shut,
                )
            }
        };
        let set = |is: bool, event: u32| if is { event } else { 0 };
        set(is_readable || socket.is_read_shut, IN)
            | set(is_writable, OUT)
            | set(socket.is_read_shut, READ_END)
            | set(is_hung_up, HUNG_UP)
            | set(socket.error != 0, ERROR)
    }

    /// Lists a descriptor that may have new events, if any of `events` is watched.
    pub(super) fn tell(&mut self, at: usize, events: u32) {
        if let Some(watch) = &mut self.descriptors[at].watch
            && watch.events & events != 0
            && !std::mem::replace(&mut watch.is_listed, true)
        {
            self.epolls[watch.epoll].push_back(at);
        }
    }

    pub(super) fn unwatch(&mut self, at: usize) -> Option<Watch> {
        let watch = self.descriptors[at].watch.take()?;
        if watch.is_listed {
            self.epolls[watch.epoll].retain(|listed| *listed != at);
        }
        Some(watch)
    }

    pub(super) fn watch(&mut self, at: usize, epoll: usize, events: u32, token: u64) {
        assert!(
            events & libc::EPOLLET as u32 != 0,
            "only edge-triggered events are emulated"
        );
        self.descriptors[at].watch = Some(Watch {
            epoll,
            events,
            token,
            is_listed: false,
        });
        if self.events(at) != 0 {
            self.tell(at, u32::MAX);
        }
    }

    // --- ends ---

    pub(super) fn close(&mut self, at: usize, is_lost: bool) {
        self.unwatch(at);
        let Is::Socket(socket) = std::mem::take(&mut self.descriptors[at].is) else {
            return;
        };
        match socket.role {
            Role::New => {}
            Role::Listens(waiting) => waiting.into_iter().for_each(|at| self.close(at, true)),
            Role::Connected(peer) => {
                let error = if is_lost || !socket.received.is_empty() {
                    ECONNRESET
                } else {
                    0
                };
                self.shut(peer, true, true, error);
            }
        }
    }

    pub(super) fn shut(&mut self, at: usize, read: bool, write: bool, error: c_int) {
        let Some(socket) = self.peer(at) else { return };
        socket.is_read_shut |= read;
        socket.is_write_shut |= write;
        if error != 0 {
            socket.error = error;
        }
        self.tell(at, u32::MAX);
    }
}

pub(super) fn number(at: usize) -> usize {
    at + FIRST as usize
}
