//! Compares the emulated sockets with Linux: the same calls, in any order, must give the same
//! results, bytes and events.

use std::{ffi::c_int, fmt::Debug};

use super::{
    Answer,
    table::{HUNG_UP, IN, LIMIT, OUT, READ_END},
};
use crate::rng::Rng;

const EVENTS: u32 = IN | OUT | READ_END | libc::EPOLLET as u32;

/// Converts a result of the C library.
fn answer(result: impl TryInto<usize>) -> Answer {
    result.try_into().map_err(|_| {
        std::io::Error::last_os_error()
            .raw_os_error()
            .expect("errno")
    })
}

fn address(path: &str) -> (libc::sockaddr_un, u32) {
    // SAFETY: plain data, for which all zeros are valid
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as u16;
    address
        .sun_path
        .iter_mut()
        .zip(path.bytes())
        .for_each(|(to, byte)| *to = byte as i8);
    (address, (2 + path.len() + 1) as u32)
}

/// A Linux descriptor, and the emulated one with the same history.
type Pair = (c_int, c_int);

struct Both {
    epoll: Pair,
    open: Vec<Pair>,
    folder: std::path::PathBuf,
}

fn same<T: Debug + PartialEq>(what: impl Debug, linux: &T, ours: T) -> T {
    assert_eq!(*linux, ours, "{what:?}: Linux's, and ours");
    ours
}

fn socket() -> Pair {
    // SAFETY: it takes no pointers
    let linux = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_NONBLOCK, 0) };
    (linux, super::socket() as c_int)
}

fn send(pair: Pair, bytes: &[u8]) -> (Answer, Answer) {
    // SAFETY: the bytes outlive the call
    let linux = unsafe {
        libc::send(
            pair.0,
            bytes.as_ptr().cast(),
            bytes.len(),
            libc::MSG_NOSIGNAL,
        )
    };
    (answer(linux), super::send(pair.1, std::iter::once(bytes)))
}

fn receive(pair: Pair, len: usize, is_peek: bool) -> (Answer, Answer) {
    let (mut linux, mut ours) = (vec![0_u8; len], vec![0_u8; len]);
    // SAFETY: there is room for `len` bytes
    let count = unsafe {
        libc::recv(
            pair.0,
            linux.as_mut_ptr().cast(),
            len,
            libc::MSG_PEEK * c_int::from(is_peek),
        )
    };
    let answers = (answer(count), super::receive(pair.1, &mut ours, is_peek));
    if answers.0 == answers.1 {
        assert_eq!(linux, ours);
    }
    answers
}

fn close(pair: Pair) {
    // SAFETY: the descriptor is not used again
    let linux = unsafe { libc::close(pair.0) };
    same("close", &answer(linux), super::close(pair.1)).expect("it was open");
}

impl Both {
    fn path(&self, name: &str) -> String {
        self.folder.join(name).to_string_lossy().into_owned()
    }

    fn add(&mut self, pair: Pair) {
        self.control(libc::EPOLL_CTL_ADD, pair);
        self.open.push(pair);
    }

    fn control(&self, operation: c_int, pair: Pair) {
        let event = |fd: c_int| libc::epoll_event {
            events: EVENTS,
            u64: fd as u64,
        };
        let mut linuxs = event(pair.0);
        // SAFETY: the event outlives the call
        let linux = unsafe { libc::epoll_ctl(self.epoll.0, operation, pair.0, &raw mut linuxs) };
        let ours = super::control(self.epoll.1, operation, pair.1, Some(event(pair.1)));
        same(operation, &answer(linux), ours).expect("it can be slept on");
    }

    fn listen(&mut self, name: &str) -> Pair {
        let pair = socket();
        let path = self.path(name);
        let (address, len) = address(&path);
        // SAFETY: the address outlives the call
        let linux = unsafe { libc::bind(pair.0, (&raw const address).cast(), len) };
        same("bind", &answer(linux), super::bind(pair.1, path.as_bytes())).expect("it is bound");
        // SAFETY: it takes no pointers
        let linux = unsafe { libc::listen(pair.0, -1) };
        same("listen", &answer(linux), super::listen(pair.1)).expect("it listens");
        self.control(libc::EPOLL_CTL_ADD, pair);
        pair
    }

    fn connect(&self, pair: Pair, name: &str) -> Answer {
        let path = self.path(name);
        let (address, len) = address(&path);
        // SAFETY: the address outlives the call
        let linux = unsafe { libc::connect(pair.0, (&raw const address).cast(), len) };
        same(
            ("connect", name),
            &answer(linux),
            super::connect(pair.1, path.as_bytes()),
        )
    }

    fn accept(&mut self, listener: Pair) {
        // SAFETY: with null pointers, it writes no address
        let linux = unsafe {
            libc::accept4(
                listener.0,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                libc::SOCK_NONBLOCK,
            )
        };
        let (linux, ours) = (&answer(linux), super::accept(listener.1));
        same("accept", &linux.map(|_| ()), ours.map(|_| ()))
            .is_ok()
            .then(|| {
                self.add((
                    linux.expect("a socket") as c_int,
                    ours.expect("a socket") as c_int,
                ));
            });
    }

    /// Compares the events that came, and their order. Linux also notifies a sender that never ran
    /// out of room: with `is_room_told`, such extra events are ignored.
    fn events(&self, what: impl Debug, is_room_told: bool) {
        let mut linux = [libc::epoll_event { events: 0, u64: 0 }; 64];
        // SAFETY: there is room for 64 events
        let count = unsafe { libc::epoll_wait(self.epoll.0, linux.as_mut_ptr(), 64, 0) };
        let linux = linux[..count as usize]
            .iter()
            .map(|event| (event.u64 as c_int, event.events));
        let number = |fd: c_int| {
            self.open
                .iter()
                .find(|pair| pair.0 == fd)
                .map(|pair| pair.1)
        };
        let linux: Vec<(Option<c_int>, u32)> =
            linux.map(|(fd, events)| (number(fd), events)).collect();
        let mut ours = Vec::new();
        let has_events = super::has_events(self.epoll.1);
        super::take_events(self.epoll.1, 64, |event| {
            let fd = event.u64 as c_int;
            ours.push((
                self.open
                    .iter()
                    .find(|pair| pair.1 == fd)
                    .map(|pair| pair.1),
                event.events,
            ));
        })
        .expect("events");
        assert_eq!(has_events, !ours.is_empty());
        let linux: Vec<_> = linux
            .into_iter()
            .filter(|event| {
                ours.contains(event) || !(is_room_told && event.1 & (OUT | HUNG_UP) != 0)
            })
            .collect();
        same(what, &linux, ours);
    }
}

#[test]
fn any_sequence_of_calls_is_answered_as_linux_does() {
    let folder = std::env::temp_dir().join(format!("nestlock-sim-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    // SAFETY: it takes no pointers
    let epoll = (unsafe { libc::epoll_create1(0) }, super::epoll() as c_int);
    let mut both = Both {
        epoll,
        open: Vec::new(),
        folder,
    };
    let (listener, closed) = (both.listen("listens"), both.listen("closed"));
    let waiting = socket();
    both.connect(waiting, "closed").expect("it listens");
    both.add(waiting);
    close(closed);
    both.events("a listener was closed", false);
    let mut rng = Rng(1);
    for step in 0..20_000 {
        let pair = rng.pick(&both.open);
        let choice = rng.below(100);
        match choice {
            0..6 if both.open.len() < 30 => {
                let pair = socket();
                let name = rng.pick(&[
                    "listens", "listens", "listens", "listens", "closed", "nobody",
                ]);
                let _ = both.connect(pair, name);
                both.add(pair);
            }
            6..12 => both.accept(listener),
            12..45 => {
                let bytes: Vec<u8> = (0..rng.below(300)).map(|_| rng.next() as u8).collect();
                let (linux, ours) = send(pair, &bytes);
                // a nearly full socket may be full for Linux only, which counts more than bytes
                if linux != Err(libc::EAGAIN) {
                    same((step, "send"), &linux, ours).ok();
                }
            }
            45..85 => {
                let len = rng.between(1, 500) as usize;
                let (linux, ours) = receive(pair, len, rng.below(4) == 0);
                same((step, "receive"), &linux, ours).ok();
            }
            85..88 => {
                let how = rng.below(3) as c_int;
                // SAFETY: it takes no pointers
                let linux = unsafe { libc::shutdown(pair.0, how) };
                same(
                    (step, "shutdown"),
                    &answer(linux),
                    super::shutdown(pair.1, how),
                )
                .ok();
            }
            88..92 if both.open.len() > 6 => {
                both.open.retain(|other| *other != pair);
                close(pair);
            }
            92..95 => {
                let (mut error, mut len) = (0, 4);
                let (level, name) = (libc::SOL_SOCKET, libc::SO_ERROR);
                // SAFETY: both outlive the call
                unsafe {
                    libc::getsockopt(pair.0, level, name, (&raw mut error).cast(), &raw mut len)
                };
                same((step, "error"), &Ok(error), super::take_error(pair.1)).ok();
            }
            95..98 => both.control(libc::EPOLL_CTL_MOD, pair),
            _ => {
                both.control(libc::EPOLL_CTL_DEL, pair);
                both.control(libc::EPOLL_CTL_ADD, pair);
            }
        }
        both.events((step, choice), (45..85).contains(&choice));
    }
    // a full socket reports room once its bytes were received
    let (one, bytes) = (socket(), vec![7; 50_000]);
    both.connect(one, "listens").expect("it listens");
    both.add(one);
    let before = both.open.len();
    while both.open.len() == before || both.open.last() == Some(&one) {
        both.accept(listener);
    }
    while let (Ok(_), Ok(_)) = send(one, &bytes) {}
    let (linux, ours) = send(one, &bytes);
    same("full", &linux, ours).expect_err("it is full");
    super::take_events(epoll.1, 64, |_| ()).expect("events");
    let mut received = 0;
    for pair in both.open.clone() {
        while let Ok(count @ 1..) = super::receive(pair.1, &mut [0; 1000], false) {
            received += count;
        }
    }
    assert!(received >= LIMIT, "{received}");
    let mut told = Vec::new();
    super::take_events(epoll.1, 64, |event| {
        told.push((event.u64 as c_int, event.events));
    })
    .expect("events");
    assert!(told.contains(&(one.1, OUT)), "{told:?}");
    std::fs::remove_dir_all(&both.folder).expect("it was ours");
}
