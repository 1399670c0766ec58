//! Memory: what is allocated while the machine is on.
//!
//! One thread runs at a time, so nothing is locked, and nothing is kept for each thread. What is freed is used again for what
//! has the same size, and is never given back. It all lies in one place, in pages as large as the system has: asking for
//! small ones, one after the other, was a fifth of the simulator's time. That place is the same in each run.
//!
//! What a process had when it was killed is nobody's. Of that, only what is large is used again: fred's channels, which are
//! most of it, 2 MB for a connection. Something small may be known to others: lists that go through all threads, or what is
//! made once for all of them.

use std::alloc::{GlobalAlloc, Layout, System};

use crate::kernel::{self, Turned};

/// Where it lies: neither programs nor libraries are put there.
const START: usize = 0x1000_0000_0000;
/// As much as there may be; only what is written to is there.
const SPACE: usize = 1 << 34;
const PAGE: usize = 4096;
/// Sizes: each sixteenth byte up to 128, then four to each power of two.
const SIZES: usize = 8 + 4 * 27;

/// What is as large as this is its process's alone.
const LARGE: usize = 64 * 1024;
/// So much of that is known at a time; of what is more than that, none is used again.
const MOST_LARGE: usize = 1 << 14;

/// Nothing but a name.
#[derive(Debug)]
pub(crate) struct Memory;

struct Place {
    next: usize,
    /// What was freed, by its size: the first of a list whose members begin with the address of the next.
    free: [usize; SIZES],
    /// So many are known: where they are, how large, and whose.
    count: usize,
    large: [(usize, usize, usize); MOST_LARGE],
}

static PLACE: Turned<Place> =
    Turned::new(Place { next: START, free: [0; SIZES], count: 0, large: [(0, 0, 0); MOST_LARGE] });

/// To be called before the machine is on.
pub(crate) fn prepare() {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: nothing else is there, or it fails
    unsafe {
        let place = libc::mmap(START as *mut _, SPACE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        assert!(place as usize == START, "no place for memory");
        // where there are none, small ones do
        libc::madvise(place, SPACE, libc::MADV_HUGEPAGE);
    }
}

/// A process was killed: nobody looks at what it had.
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

/// Where the size stands that these need, and how many bytes that is.
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
            self.large[self.count] = (found, at, kernel::process());
            self.count += 1;
        }
        found as *mut u8
    }

    fn find(&mut self, at: usize, size: usize) -> usize {
        let found = self.free[at];
        if found != 0 {
            // SAFETY: it was freed, and begins with the next
            self.free[at] = unsafe { *(found as *const usize) };
            return found;
        }
        // a power of two is aligned to itself
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
            && let Some(known) = self.large[..self.count].iter().rposition(|known| known.0 == address)
        {
            self.forget(known);
        }
    }

    fn put(&mut self, address: usize, at: usize) {
        // SAFETY: nobody uses it any more, and it is large enough
        unsafe { *(address as *mut usize) = self.free[at] };
        self.free[at] = address;
    }

    fn forget(&mut self, known: usize) {
        self.count -= 1;
        self.large[known] = self.large[self.count];
    }
}

// SAFETY: each address is given once, until it is freed. Only who has the turn calls it while the machine is on; a new thread
// that has not yet had it, while its maker waits for it
unsafe impl GlobalAlloc for Memory {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if kernel::is_on() {
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
        // SAFETY: the caller's promise; both have so many bytes
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
