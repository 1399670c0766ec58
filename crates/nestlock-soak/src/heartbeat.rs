//! Writes down when nobody ran: a starved machine excuses time limits, never exclusion.

use std::{sync::Arc, thread, time::Duration};

use crate::{
    clock::{MILLI, now},
    history::History,
};

const BEAT: Duration = Duration::from_millis(5);
/// Later than this is a gap.
const LATE: u64 = 12 * MILLI;

/// Of this process: for as long as it lives.
pub(crate) fn of_the_process(history: Arc<History>) {
    thread::spawn(move || {
        let mut last = now();
        loop {
            thread::sleep(BEAT);
            last = beat(&history, "gap", last);
        }
    });
}

/// Of the runtime, whose workers may be blocked.
pub(crate) async fn of_the_runtime(history: Arc<History>) {
    let mut last = now();
    loop {
        tokio::time::sleep(BEAT).await;
        last = beat(&history, "agap", last);
    }
}

/// One beat after `last`; returns its time.
pub(crate) fn beat(history: &History, what: &str, last: u64) -> u64 {
    let time = now();
    if time - last > LATE {
        history.write_at(time, format_args!("{what} {last}"));
    }
    time
}
