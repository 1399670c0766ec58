//! The contexts of threads, and how one OS thread changes from one to another.

use std::{
    cell::Cell,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
};

/// Where a thread stopped: its stack, with the callee-saved registers on it, and its thread-locals.
/// The assembly below knows the offsets of the fields.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Context {
    stack: Cell<usize>,
    locals: Cell<usize>,
    /// A futex: 1 after the thread has left its OS thread.
    pub(crate) is_parked: AtomicU32,
}

impl Context {
    pub(crate) const fn new() -> Self {
        Self {
            stack: Cell::new(0),
            locals: Cell::new(0),
            is_parked: AtomicU32::new(0),
        }
    }
}

/// Whether a program may set the address of its thread-locals without a system call.
static HAS_WRFSBASE: AtomicBool = AtomicBool::new(false);

/// Detects what the processor can do. Must be called before the first [`switch`].
pub(crate) fn prepare() {
    // SAFETY: it takes no pointers. 2: HWCAP2_FSGSBASE
    let may = unsafe { libc::getauxval(libc::AT_HWCAP2) } & 2 != 0;
    HAS_WRFSBASE.store(may, Ordering::Relaxed);
}

/// Stops the caller, and resumes `to`. One OS thread runs all of them in turn: waking another OS
/// thread took two thirds of the simulator's time.
///
/// # Safety
/// `to` must be stopped. Each context resumes with its own thread-locals.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn switch(from: &Context, to: &Context) {
    // 158, 0x1002: arch_prctl, ARCH_SET_FS, for processors and kernels without `wrfsbase`
    std::arch::naked_asm!(
        "push rbp", "push rbx", "push r12", "push r13", "push r14", "push r15",
        "mov rax, fs:0", "mov [rdi], rsp", "mov [rdi + 8], rax",
        "mov rsp, [rsi]", "mov rsi, [rsi + 8]",
        "cmp byte ptr [rip + {has_wrfsbase}], 0", "je 2f",
        "wrfsbase rsi", "jmp 3f",
        "2:", "mov edi, 0x1002", "mov eax, 158", "syscall",
        "3:", "pop r15", "pop r14", "pop r13", "pop r12", "pop rbx", "pop rbp",
        "ret",
        has_wrfsbase = sym HAS_WRFSBASE,
    )
}

/// Stops the caller. A [`switch`] to its context continues on its stack; the OS thread that ran it
/// until then idles for ever.
///
/// # Safety
/// No thread may have switched to it yet.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn leave(to: &Context) {
    // 202, 129: futex, private FUTEX_WAKE; 34: pause. After the store to `is_parked`, another
    // thread may use the stack
    std::arch::naked_asm!(
        "push rbp",
        "push rbx",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "mov rax, fs:0",
        "mov [rdi], rsp",
        "mov [rdi + 8], rax",
        "mov dword ptr [rdi + 16], 1",
        "add rdi, 16",
        "mov esi, 129",
        "mov edx, 1",
        "mov eax, 202",
        "syscall",
        "2:",
        "mov eax, 34",
        "syscall",
        "jmp 2b",
    )
}
