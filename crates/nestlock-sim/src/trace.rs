//! The trace: a checksum of all that happens, which the same seed must reproduce. A loud one is
//! printed as well.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::{clock::now, rng::mix, turn::Turned};

struct Trace {
    sum: u64,
    /// How often a next thread was drawn.
    steps: u64,
}

static TRACE: Turned<Trace> = Turned::new(Trace {
    sum: 0xcbf2_9ce4_8422_2325,
    steps: 0,
});
static LOUD: AtomicBool = AtomicBool::new(false);

/// Sets whether events are printed.
pub(crate) fn be_loud(loud: bool) {
    LOUD.store(loud, Relaxed);
}

/// Adds an event to the trace. The same seed must lead to the same checksum.
pub(crate) fn note(what: &str, bytes: &[u8]) {
    TRACE.with(|trace| {
        for words in [what.as_bytes(), bytes] {
            for word in words.chunks(8) {
                let mut eight = [0; 8];
                eight[..word.len()].copy_from_slice(word);
                trace.sum = mix(trace.sum ^ u64::from_le_bytes(eight));
            }
            trace.sum = mix(trace.sum ^ words.len() as u64);
        }
        trace.sum = mix(trace.sum ^ now());
    });
    if LOUD.load(Relaxed) {
        println!("{:>12.6} {what} {}", now() as f64 / 1e9, readable(bytes));
    }
}

/// Adds to the trace that this thread was drawn at `now`.
pub(crate) fn step(now: u64, thread: usize) {
    TRACE.with(|trace| {
        trace.steps += 1;
        trace.sum = mix(trace.sum ^ now ^ (thread as u64) << 56);
    });
}

/// Formats requests and replies as one line, without the syntax of RESP.
fn readable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let words = text
        .split("\r\n")
        .filter(|word| !word.is_empty() && !word.starts_with(['*', '$', '>']));
    let words = words.map(|word| if word.len() > 200 { "<script>" } else { word });
    words.collect::<Vec<_>>().join(" ")
}

/// Returns the sum of the trace, and how often a next thread was drawn.
pub(crate) fn sum() -> (u64, u64) {
    TRACE.with(|trace| (trace.sum, trace.steps))
}
