//! Replaces the functions of the C library through which std, tokio, mio and others use time,
//! randomness, threads, sockets and sleep. Before the machine runs, each of them behaves as usual.

use std::{
    ffi::{c_int, c_long, c_void},
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

use crate::{
    clock::{MILLI, SECOND},
    context::leave,
    kernel::{self, NewThread, Waits},
    sockets,
    turn::is_on,
};

/// Makes a system call.
unsafe fn system(number: c_long, args: [c_long; 6]) -> c_long {
    let result;
    // SAFETY: the caller's promise; the kernel preserves all registers but these
    unsafe {
        std::arch::asm!("syscall", inlateout("rax") number => result, in("rdi") args[0], in("rsi") args[1],
            in("rdx") args[2], in("r10") args[3], in("r8") args[4], in("r9") args[5],
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result
}

fn fail(error: c_int) -> c_long {
    // SAFETY: `errno` belongs to the calling thread
    unsafe { *libc::__errno_location() = error };
    -1
}

fn answer(result: c_long) -> c_long {
    if (-4095..0).contains(&result) {
        fail(-result as c_int)
    } else {
        result
    }
}

// --- time ---

/// # Safety
/// The contract of the C library's function.
#[unsafe(no_mangle)]
unsafe extern "C" fn clock_gettime(id: libc::clockid_t, out: *mut libc::timespec) -> c_int {
    if !is_on() {
        // SAFETY: the caller's promise
        return answer(unsafe {
            system(
                libc::SYS_clock_gettime,
                [c_long::from(id), out as c_long, 0, 0, 0, 0],
            )
        }) as c_int;
    }
    let time = match id {
        libc::CLOCK_REALTIME | libc::CLOCK_REALTIME_COARSE => {
            kernel::clock(true) + 1_700_000_000 * SECOND
        }
        libc::CLOCK_BOOTTIME => kernel::clock(true),
        _ => kernel::clock(false),
    };
    // SAFETY: the caller's promise
    unsafe {
        *out = libc::timespec {
            tv_sec: (time / SECOND) as i64,
            tv_nsec: (time % SECOND) as i64,
        }
    };
    0
}

fn nanos(time: &libc::timespec) -> u64 {
    time.tv_sec as u64 * SECOND + time.tv_nsec as u64
}

// --- randomness ---

/// # Safety
/// The contract of the C library's function.
#[unsafe(no_mangle)]
unsafe extern "C" fn getrandom(out: *mut u8, len: usize, flags: u32) -> isize {
    if is_on() {
        // SAFETY: the caller's promise
        kernel::fill(unsafe { std::slice::from_raw_parts_mut(out, len) });
        return len as isize;
    }
    // SAFETY: the caller's promise
    answer(unsafe {
        system(
            libc::SYS_getrandom,
            [out as c_long, len as c_long, c_long::from(flags), 0, 0, 0],
        )
    }) as isize
}

/// Returns a fixed number: the server reports it to its clients.
#[unsafe(no_mangle)]
extern "C" fn getpid() -> libc::pid_t {
    if is_on() {
        return 1;
    }
    // SAFETY: it takes no arguments
    unsafe { system(libc::SYS_getpid, [0; 6]) as libc::pid_t }
}

// --- sleep ---

/// # Safety
/// The contract of the C library's function.
#[unsafe(no_mangle)]
unsafe extern "C" fn epoll_wait(
    fd: c_int,
    events: *mut libc::epoll_event,
    max: c_int,
    timeout: c_int,
) -> c_int {
    if !sockets::is_ours(fd) {
        let args = [
            c_long::from(fd),
            events as c_long,
            c_long::from(max),
            c_long::from(timeout),
            0,
            0,
        ];
        // SAFETY: the caller's promise
        return answer(unsafe { system(libc::SYS_epoll_wait, args) }) as c_int;
    }
    let until = (timeout > 0).then(|| kernel::after(timeout as u64 * MILLI));
    if timeout != 0
        && !kernel::wait(Waits::Event {
            epoll: fd,
            until,
            has_come: false,
        })
    {
        return 0;
    }
    let mut next = events;
    told(sockets::take_events(fd, max as usize, |event| {
        // SAFETY: there is room for `max` events
        unsafe {
            next.write(event);
            next = next.add(1);
        }
    })) as c_int
}

// --- descriptors ---

fn told(answer: sockets::Answer) -> c_long {
    answer.map_or_else(fail, |answer| answer as c_long)
}

/// Defines calls that create a descriptor: an emulated one while the machine is on.
macro_rules! making {
    ($($name:ident = $number:ident($($argument:ident: $type:ty),*) $ours:block)*) => {
        $(
            /// # Safety
            /// The contract of the C library's function.
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
                if is_on() {
                    return $ours as c_int;
                }
                let mut args = [0; 6];
                for (at, argument) in [$(c_long::from($argument)),*].into_iter().enumerate() {
                    args[at] = argument;
                }
                // SAFETY: it takes no pointers
                answer(unsafe { system(libc::$number, args) }) as c_int
            }
        )*
    };
}

making! {
    epoll_create1 = SYS_epoll_create1(flags: c_int) { sockets::epoll() }
    eventfd = SYS_eventfd2(count: u32, flags: c_int) { sockets::waker() }
    socket = SYS_socket(family: c_int, kind: c_int, protocol: c_int) {
        assert!(family == libc::AF_UNIX && kind & 15 == libc::SOCK_STREAM, "a socket of family {family}");
        assert!(kind & libc::SOCK_NONBLOCK != 0, "a blocking socket");
        sockets::socket()
    }
}

/// Defines calls on a descriptor, which may be an emulated one.
macro_rules! with_descriptor {
    ($($name:ident = $number:ident($fd:ident $(, $argument:ident: $type:ty)*) -> $result:ty $ours:block)*) => {
        $(
            /// # Safety
            /// The contract of the C library's function.
            #[unsafe(no_mangle)]
            #[allow(clippy::cast_lossless)] // some are pointers
            unsafe extern "C" fn $name($fd: c_int $(, $argument: $type)*) -> $result {
                if sockets::is_ours($fd) {
                    #[allow(unused_unsafe)] // some have no pointers
                    // SAFETY: the caller's promise
                    return told(unsafe { $ours }) as $result;
                }
                let mut args = [0; 6];
                for (at, argument) in [$fd as c_long $(, $argument as c_long)*].into_iter().enumerate() {
                    args[at] = argument;
                }
                // SAFETY: the caller's promise
                answer(unsafe { system(libc::$number, args) }) as $result
            }
        )*
    };
}

with_descriptor! {
    bind = SYS_bind(fd, address: *const libc::sockaddr_un, len: u32) -> c_int { sockets::bind(fd, path(address, len)) }
    connect = SYS_connect(fd, address: *const libc::sockaddr_un, len: u32) -> c_int {
        sockets::connect(fd, path(address, len))
    }
    listen = SYS_listen(fd, backlog: c_int) -> c_int { sockets::listen(fd) }
    accept4 = SYS_accept4(fd, address: *mut libc::sockaddr_un, len: *mut u32, flags: c_int) -> c_int {
        // the peer's socket has no path
        if !address.is_null() {
            (*address).sun_family = libc::AF_UNIX as u16;
            *len = size_of::<libc::sa_family_t>() as u32;
        }
        sockets::accept(fd)
    }
    recv = SYS_recvfrom(fd, bytes: *mut u8, len: usize, flags: c_int) -> isize {
        assert!(flags & !libc::MSG_PEEK == 0, "recv {flags}");
        sockets::receive(fd, std::slice::from_raw_parts_mut(bytes, len), flags == libc::MSG_PEEK)
    }
    send = SYS_sendto(fd, bytes: *const u8, len: usize, flags: c_int) -> isize {
        assert!(flags & !libc::MSG_NOSIGNAL == 0, "send {flags}");
        sockets::send(fd, [std::slice::from_raw_parts(bytes, len)].into_iter())
    }
    writev = SYS_writev(fd, slices: *const libc::iovec, count: c_int) -> isize {
        let slices = std::slice::from_raw_parts(slices, count as usize);
        sockets::send(fd, slices.iter().map(|slice| std::slice::from_raw_parts(slice.iov_base.cast(), slice.iov_len)))
    }
    write = SYS_write(fd, bytes: *const c_void, len: usize) -> isize { sockets::write_to_waker(fd) }
    shutdown = SYS_shutdown(fd, how: c_int) -> c_int { sockets::shutdown(fd, how) }
    close = SYS_close(fd) -> c_int { sockets::close(fd) }
    fcntl = SYS_fcntl(fd, operation: c_int, argument: c_long) -> c_int {
        match operation {
            libc::F_DUPFD_CLOEXEC => sockets::duplicate(fd),
            // std checks it before it closes a descriptor, with debug assertions
            libc::F_GETFD => sockets::flags(fd),
            // tokio checks it before it takes over a socket, with debug assertions: all of these
            // are non-blocking
            libc::F_GETFL => sockets::flags(fd).map(|_| libc::O_NONBLOCK as usize),
            _ => panic!("fcntl {operation}"),
        }
    }
    getsockopt = SYS_getsockopt(fd, level: c_int, option: c_int, value: *mut c_int, len: *mut u32) -> c_int {
        assert!((level, option) == (libc::SOL_SOCKET, libc::SO_ERROR), "getsockopt {level} {option}");
        sockets::take_error(fd).map(|error| {
            (*value, *len) = (error, size_of::<c_int>() as u32);
            0
        })
    }
    epoll_ctl = SYS_epoll_ctl(fd, operation: c_int, of: c_int, event: *const libc::epoll_event) -> c_int {
        if !sockets::is_ours(of) {
            // tokio's socket for signals, if another crate enables that feature: no signal comes
            return 0;
        }
        sockets::control(fd, operation, of, (!event.is_null()).then(|| *event))
    }
}

/// Returns the path of a socket's address, without its final zero.
///
/// # Safety
/// `address` must be a socket's address of `len` bytes.
unsafe fn path<'a>(address: *const libc::sockaddr_un, len: u32) -> &'a [u8] {
    let len = (len as usize).saturating_sub(std::mem::offset_of!(libc::sockaddr_un, sun_path));
    // SAFETY: the caller's promise
    let path =
        unsafe { std::slice::from_raw_parts((&raw const (*address).sun_path).cast::<u8>(), len) };
    path.strip_suffix(&[0]).unwrap_or(path)
}

// --- futexes, and threads that yield ---

/// Handles `syscall`: std sleeps on futexes by it, and getrandom 0.2 calls it instead of the
/// function above.
///
/// # Safety
/// The contract of the C library's function.
#[unsafe(no_mangle)]
unsafe extern "C" fn syscall(
    number: c_long,
    first: c_long,
    second: c_long,
    third: c_long,
    fourth: c_long,
    fifth: c_long,
    sixth: c_long,
) -> c_long {
    match number {
        // SAFETY: the caller's promise
        libc::SYS_getrandom if is_on() => unsafe {
            getrandom(first as *mut u8, second as usize, 0) as c_long
        },
        // SAFETY: the caller's promise
        libc::SYS_futex if is_on() => unsafe {
            futex(
                first as *const AtomicU32,
                second as c_int,
                third,
                fourth as *const _,
            )
        },
        // SAFETY: the caller's promise
        _ => answer(unsafe { system(number, [first, second, third, fourth, fifth, sixth]) }),
    }
}

unsafe fn futex(
    word: *const AtomicU32,
    operation: c_int,
    value: c_long,
    time: *const libc::timespec,
) -> c_long {
    let address = word as usize;
    let operation = operation & !(libc::FUTEX_PRIVATE_FLAG | libc::FUTEX_CLOCK_REALTIME);
    if operation == libc::FUTEX_WAKE || operation == libc::FUTEX_WAKE_BITSET {
        return kernel::wake(address, value as usize) as c_long;
    }
    assert!(
        operation == libc::FUTEX_WAIT || operation == libc::FUTEX_WAIT_BITSET,
        "futex operation {operation}"
    );
    // SAFETY: the caller's promise
    if unsafe { &*word }.load(Ordering::SeqCst) != value as u32 {
        return fail(libc::EAGAIN);
    }
    // SAFETY: the caller's promise
    let until = unsafe { time.as_ref() }.map(|time| {
        // a span, or a time of the monotonic clock
        let span = if operation == libc::FUTEX_WAIT {
            nanos(time)
        } else {
            nanos(time).saturating_sub(kernel::clock(false))
        };
        kernel::after(span)
    });
    if kernel::wait(Waits::Futex {
        address,
        until,
        woken: false,
    }) {
        0
    } else {
        fail(libc::ETIMEDOUT)
    }
}

/// Passes the turn while the machine is on.
#[unsafe(no_mangle)]
extern "C" fn sched_yield() -> c_int {
    if is_on() {
        kernel::wait(Waits::No);
    }
    0
}

// --- threads ---

type Routine = extern "C" fn(*mut c_void) -> *mut c_void;
type Create = unsafe extern "C" fn(
    *mut libc::pthread_t,
    *const libc::pthread_attr_t,
    Routine,
    *mut c_void,
) -> c_int;

struct Begin {
    thread: NewThread,
    routine: Routine,
    argument: *mut c_void,
}

extern "C" fn run(begin: *mut c_void) -> *mut c_void {
    // SAFETY: made by `pthread_create` below, for this thread alone
    let Begin {
        thread,
        routine,
        argument,
    } = *unsafe { Box::from_raw(begin.cast::<Begin>()) };
    let context = thread.context;
    kernel::begin(&thread);
    // SAFETY: the context was made for this thread, which has not run before
    unsafe { leave(context) };
    routine(argument);
    // returning would drop its thread-locals while another thread has the turn
    kernel::wait(Waits::ForEver);
    unreachable!("no thread passes it the turn")
}

/// # Safety
/// The contract of the C library's function.
#[unsafe(no_mangle)]
unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    routine: Routine,
    argument: *mut c_void,
) -> c_int {
    static REAL: OnceLock<Create> = OnceLock::new();
    let real = REAL.get_or_init(|| {
        // SAFETY: the name ends with a zero
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, c"pthread_create".as_ptr()) };
        assert!(!found.is_null(), "no pthread_create");
        // SAFETY: this is the function's type
        unsafe { std::mem::transmute::<*mut c_void, Create>(found) }
    });
    if !is_on() {
        // SAFETY: the caller's promise
        return unsafe { real(thread, attributes, routine, argument) };
    }
    let new = kernel::add_thread();
    let context = new.context;
    let begin = Box::into_raw(Box::new(Begin {
        thread: new,
        routine,
        argument,
    }));
    // SAFETY: the caller's promise; `run` takes ownership of `begin`
    let result = unsafe { real(thread, attributes, run, begin.cast()) };
    while result == 0 && context.is_parked.load(Ordering::Acquire) == 0 {
        let word = &raw const context.is_parked as c_long;
        let args = [
            word,
            c_long::from(libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG),
            0,
            0,
            0,
            0,
        ];
        // SAFETY: the word is never freed
        unsafe { system(libc::SYS_futex, args) };
    }
    result
}
