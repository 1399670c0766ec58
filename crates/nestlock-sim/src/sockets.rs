//! Emulated descriptors: Unix sockets, eventfds and epolls.
//!
//! They behave like Linux's (`net/unix/af_unix.c`, `fs/eventpoll.c`) as far as std, tokio and mio
//! can see: real system calls took half of the simulator's time. Their numbers are beyond the
//! system's, and none is used twice. So a call that is not emulated fails at once, and the number
//! of a closed descriptor never refers to another one.

mod table;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, VecDeque},
    ffi::c_int,
};

use libc::{EADDRINUSE, EAGAIN, ECONNREFUSED, EEXIST, EINVAL, EISCONN, ENOENT, ENOTCONN, EPIPE};

use self::table::{FIRST, IN, Is, LIMIT, OUT, Role, Socket, Table, number};
use crate::{process::as_process, turn::Turned};

/// The result of a call, or its `errno`.
pub(crate) type Answer = Result<usize, c_int>;

static TABLE: Turned<Table> = Turned::new(Table {
    descriptors: Vec::new(),
    epolls: Vec::new(),
    paths: BTreeMap::new(),
});

/// Returns `true` if `fd` is an emulated descriptor.
pub(crate) fn is_ours(fd: c_int) -> bool {
    fd >= FIRST
}

/// Runs `act` on the table. Its allocations belong to process 0, so they survive if the calling
/// process is killed.
fn with<R>(act: impl FnOnce(&mut Table) -> R) -> R {
    as_process(0, || TABLE.with(act))
}

// --- what the C library's functions of these names do ---

pub(crate) fn socket() -> usize {
    with(|table| number(table.add(Is::Socket(Socket::default()))))
}

pub(crate) fn bind(fd: c_int, path: &[u8]) -> Answer {
    with(|table| {
        let (at, _) = table.socket(fd)?;
        if table.paths.contains_key(path) {
            return Err(EADDRINUSE);
        }
        table.paths.insert(path.to_vec(), at);
        Ok(0)
    })
}

pub(crate) fn listen(fd: c_int) -> Answer {
    with(|table| {
        let (at, socket) = table.socket(fd)?;
        socket.role = Role::Listens(VecDeque::new());
        table.tell(at, u32::MAX);
        Ok(0)
    })
}

/// Connects at once. The connection is accepted later.
pub(crate) fn connect(fd: c_int, path: &[u8]) -> Answer {
    with(|table| {
        let (at, socket) = table.socket(fd)?;
        if !matches!(socket.role, Role::New) {
            return Err(EISCONN);
        }
        let listener = *table.paths.get(path).ok_or(ENOENT)?;
        if !table
            .peer(listener)
            .is_some_and(|socket| matches!(socket.role, Role::Listens(_)))
        {
            return Err(ECONNREFUSED);
        }
        let other = table.add(Is::Socket(Socket::connected(at)));
        if let Some(socket) = table.peer(at) {
            socket.role = Role::Connected(other);
        }
        if let Some(Socket {
            role: Role::Listens(waiting),
            ..
        }) = table.peer(listener)
        {
            waiting.push_back(other);
        }
        table.tell(listener, IN);
        Ok(0)
    })
}

pub(crate) fn accept(fd: c_int) -> Answer {
    with(|table| {
        let Role::Listens(waiting) = &mut table.socket(fd)?.1.role else {
            return Err(EINVAL);
        };
        waiting.pop_front().map(number).ok_or(EAGAIN)
    })
}

/// Sends as many bytes as there is room for.
pub(crate) fn send<'a>(fd: c_int, slices: impl Iterator<Item = &'a [u8]>) -> Answer {
    with(|table| {
        let (_, socket) = table.socket(fd)?;
        let Role::Connected(peer) = socket.role else {
            return Err(ENOTCONN);
        };
        if socket.is_write_shut {
            return Err(EPIPE);
        }
        let received = &mut table.peer(peer).ok_or(EPIPE)?.received;
        let (mut sent, mut is_full) = (0, false);
        for slice in slices {
            let len = slice.len().min(LIMIT.saturating_sub(received.len()));
            received.extend(&slice[..len]);
            sent += len;
            is_full |= len < slice.len();
        }
        if sent > 0 {
            table.tell(peer, IN);
        }
        if is_full && sent == 0 {
            Err(EAGAIN)
        } else {
            Ok(sent)
        }
    })
}

/// Receives bytes. With `is_peek`, they stay in the buffer.
pub(crate) fn receive(fd: c_int, bytes: &mut [u8], is_peek: bool) -> Answer {
    with(|table| {
        let (_, socket) = table.socket(fd)?;
        let Role::Connected(peer) = socket.role else {
            return Err(EINVAL);
        };
        let before = socket.received.len();
        if before == 0 {
            return match socket.take_error() {
                0 if socket.is_read_shut => Ok(0),
                0 => Err(EAGAIN),
                error => Err(error),
            };
        }
        let len = bytes.len().min(before);
        let (first, second) = socket.received.as_slices();
        let from_first = len.min(first.len());
        bytes[..from_first].copy_from_slice(&first[..from_first]);
        bytes[from_first..len].copy_from_slice(&second[..len - from_first]);
        if is_peek {
            return Ok(len);
        }
        socket.received.drain(..len);
        // Linux notifies the sender in any case: here, as with TCP, only if it may have waited for
        // room
        if before > LIMIT / 4 && before - len <= LIMIT / 4 {
            table.tell(peer, OUT);
        }
        Ok(len)
    })
}

pub(crate) fn shutdown(fd: c_int, how: c_int) -> Answer {
    with(|table| {
        let (at, socket) = table.socket(fd)?;
        let peer = if let Role::Connected(peer) = socket.role {
            Some(peer)
        } else {
            None
        };
        let (read, write) = (how != libc::SHUT_WR, how != libc::SHUT_RD);
        table.shut(at, read, write, 0);
        if let Some(peer) = peer {
            table.shut(peer, write, read, 0);
        }
        Ok(0)
    })
}

/// Returns the pending error and clears it.
pub(crate) fn take_error(fd: c_int) -> Result<c_int, c_int> {
    with(|table| Ok(table.socket(fd)?.1.take_error()))
}

/// Returns the flags of an open descriptor.
pub(crate) fn flags(fd: c_int) -> Answer {
    with(|table| table.find(fd).map(|_| libc::FD_CLOEXEC as usize))
}

pub(crate) fn close(fd: c_int) -> Answer {
    with(|table| {
        let at = table.find(fd)?;
        table.close(at, false);
        Ok(0)
    })
}

// --- eventfds and epolls ---

pub(crate) fn waker() -> usize {
    with(|table| number(table.add(Is::Waker(false))))
}

pub(crate) fn write_to_waker(fd: c_int) -> Answer {
    with(|table| {
        let at = table.find(fd)?;
        let Is::Waker(is_written) = &mut table.descriptors[at].is else {
            return Err(EINVAL);
        };
        *is_written = true;
        table.tell(at, IN);
        Ok(size_of::<u64>())
    })
}

pub(crate) fn epoll() -> usize {
    with(|table| {
        table.epolls.push(VecDeque::new());
        number(table.add(Is::Epoll(table.epolls.len() - 1)))
    })
}

/// Creates another number for an epoll.
pub(crate) fn duplicate(fd: c_int) -> Answer {
    with(|table| Ok(number(table.add(Is::Epoll(table.epoll(fd)?)))))
}

pub(crate) fn control(
    fd: c_int,
    operation: c_int,
    of: c_int,
    event: Option<libc::epoll_event>,
) -> Answer {
    with(|table| {
        let (epoll, at) = (table.epoll(fd)?, table.find(of)?);
        let is_watched = table.descriptors[at]
            .watch
            .as_ref()
            .map(|watch| watch.epoll == epoll);
        match (operation, event, is_watched) {
            (libc::EPOLL_CTL_ADD, Some(event), None) => {
                table.watch(at, epoll, event.events, event.u64);
            }
            (libc::EPOLL_CTL_ADD, _, Some(true)) => return Err(EEXIST),
            (libc::EPOLL_CTL_ADD, ..) => panic!("the descriptor is already in the epoll"),
            (_, _, None | Some(false)) => return Err(ENOENT),
            (libc::EPOLL_CTL_MOD, Some(event), _) => {
                table.unwatch(at);
                table.watch(at, epoll, event.events, event.u64);
            }
            (libc::EPOLL_CTL_DEL, ..) => _ = table.unwatch(at),
            _ => return Err(EINVAL),
        }
        Ok(0)
    })
}

/// Returns `true` if there are events for an epoll.
pub(crate) fn has_events(fd: c_int) -> bool {
    with(|table| {
        table
            .epoll(fd)
            .is_ok_and(|epoll| table.epolls[epoll].iter().any(|at| table.events(*at) != 0))
    })
}

/// Takes at most `most` events. Returns their number.
pub(crate) fn take_events(
    fd: c_int,
    most: usize,
    mut take: impl FnMut(libc::epoll_event),
) -> Answer {
    with(|table| {
        let (epoll, mut count) = (table.epoll(fd)?, 0);
        while count < most
            && let Some(at) = table.epolls[epoll].pop_front()
        {
            let events = table.events(at);
            let Some(watch) = &mut table.descriptors[at].watch else {
                continue;
            };
            watch.is_listed = false;
            if events != 0 {
                take(libc::epoll_event {
                    events,
                    u64: watch.token,
                });
                count += 1;
            }
        }
        Ok(count)
    })
}
