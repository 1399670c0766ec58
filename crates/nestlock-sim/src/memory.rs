//! The global allocator while the machine is on.
//!
//! Only one thread runs at a time, so there are no locks and no caches per thread. Freed blocks are
//! reused for the same size, and never returned to the system. All blocks are in one mapping of
//! huge pages: mapping small pages one by one took a fifth of the simulator's time. The mapping has
//! the same address in each run.
//!
//! When a process is killed, only its large blocks are reused: fred's channels, which are most of
//! its memory, 2 MB per connection. Small blocks may be shared: lists that go through all threads,
//! or what is created once for all processes.

use std::alloc::{GlobalAlloc, Layout, System};

use crate::{
    process,
    turn::{Turned, is_on},
};

/// The address of the mapping: the system places neither programs nor libraries there.
const START: usize = 0x1000_0000_0000;
/// The size of the mapping. Only pages that are written to use memory.
const SPACE: usize = 1 << 34;
const PAGE: usize = 4096;
/// The number of size classes: one per 16 bytes up to 128, then four per power of two.
const SIZES: usize = 8 + 4 * 27;

/// The size from which on a block belongs to its process alone.
const LARGE: usize = 64 * 1024;
/// How many large blocks are tracked at a time. The others are not reused after a kill.
const MOST_LARGE: usize = 1 << 14;

/// The allocator. Its state is in `PLACE`.
#[derive(Debug)]
pub(crate) struct Memory;

struct Place {
    next: usize,
    /// The first free block of each size class. Each free block begins with the address of the
    /// next.
    free: [usize; SIZES],
    /// The number of large blocks tracked in `large`.
    count: usize,
    /// Their addresses, size classes and processes.
    large: [(usize, usize, usize); MOST_LARGE],
}

static PLACE: Turned<Place> = Turned::new(Place {
    next: START,
    free: [0; SIZES],
    count: 0,
    large: [(0, 0, 0); MOST_LARGE],
});

/// Maps the memory. Must be called before the machine is on.
pub(crate) fn prepare() {
    let flags =
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: the call fails if anything else is mapped there
    unsafe {
        let place = libc::mmap(
            START as *mut _,
            SPACE,
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
            -1,
            0,
        );
        assert!(place as usize == START, "no place for memory");
        // if the system has no huge pages, small ones do
        libc::madvise(place, SPACE, libc::MADV_HUGEPAGE);
    }
}

/// Frees the large blocks of a killed process, whose code never runs again.
pub(crate) fn reclaim(process: usize) {
    PLACE.with(|place| {
        for known in (0..place.count).rev() {
            let (address, at, owner) = place.large[known];
            if owner == process {
                place.put(address, at);
                place.forget(known);
            }
        }
    });
}

/// Returns the size class of a layout, and the size of its blocks in bytes.
fn size(layout: Layout) -> (usize, usize) {
    assert!(layout.align() <= PAGE, "{layout:?}");
    let size = match layout.align() {
        ..=16 => layout.size().max(1).next_multiple_of(16),
        align => layout.size().max(align).next_power_of_two(),
    };
    if size <= 128 {
        return (size / 16 - 1, size);
    }
    let power = (size - 1).ilog2() as usize;
    let size = size.next_multiple_of(1 << (power - 2));
    (8 + 4 * (power - 7) + (size >> (power - 2)) - 5, size)
}

fn is_ours(address: *mut u8) -> bool {
    (START..START + SPACE).contains(&(address as usize))
}

impl Place {
    fn take(&mut self, layout: Layout) -> *mut u8 {
        let (at, size) = size(layout);
        let found = self.find(at, size);
        if size >= LARGE && self.count < MOST_LARGE {
            self.large[self.count] = (found, at, process::current());
            self.count += 1;
        }
        found as *mut u8
    }

    fn find(&mut self, at: usize, size: usize) -> usize {
        let found = self.free[at];
        if found != 0 {
            // SAFETY: it was freed, and begins with the address of the next
            self.free[at] = unsafe { *(found as *const usize) };
            return found;
        }
        // a block whose size is a power of two is aligned to it
        let align = (size & size.wrapping_neg()).min(PAGE);
        let found = self.next.next_multiple_of(align);
        self.next = found + size;
        assert!(self.next <= START + SPACE, "no memory");
        found
    }

    fn give_back(&mut self, address: usize, layout: Layout) {
        let (at, size) = size(layout);
        self.put(address, at);
        if size >= LARGE
            && let Some(known) = self.large[..self.count]
                .iter()
                .rposition(|known| known.0 == address)
        {
            self.forget(known);
        }
    }

    fn put(&mut self, address: usize, at: usize) {
        // SAFETY: the block is unused, and large enough
        unsafe { *(address as *mut usize) = self.free[at] };
        self.free[at] = address;
    }

    fn forget(&mut self, known: usize) {
        self.count -= 1;
        self.large[known] = self.large[self.count];
    }
}

// SAFETY: each address is given out once, until it is freed. While the machine is on, only the
// thread that has the turn calls it, or a new thread before its first turn, while its creator waits
unsafe impl GlobalAlloc for Memory {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_on() {
            return PLACE.with(|place| place.take(layout));
        }
        // SAFETY: the caller's promise
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        if is_ours(address) {
            return PLACE.with(|place| place.give_back(address as usize, layout));
        }
        // SAFETY: the caller's promise
        unsafe { System.dealloc(address, layout) }
    }

    unsafe fn realloc(&self, address: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the caller's promise
        let new_layout = unsafe { Layout::from_size_align_unchecked(new_size, layout.align()) };
        if is_ours(address) && size(layout) == size(new_layout) {
            return address;
        }
        // SAFETY: the caller's promise; both have at least this many bytes
        unsafe {
            let new = self.alloc(new_layout);
            if !new.is_null() {
                new.copy_from_nonoverlapping(address, layout.size().min(new_size));
                self.dealloc(address, layout);
            }
            new
        }
    }
}
