//! Records when a process did not run: a starved machine excuses missed time limits, but never a
//! breach of exclusion.

use std::{sync::Arc, thread, time::Duration};

use crate::{
    clock::{MILLI, now},
    history::History,
};

const BEAT: Duration = Duration::from_millis(5);
/// A heartbeat later than this is recorded as a gap.
const LATE: u64 = 12 * MILLI;

/// Starts the heartbeat of this process, which lasts as long as the process.
pub(crate) fn of_the_process(history: Arc<History>) {
    thread::spawn(move || {
        let mut last = now();
        loop {
            thread::sleep(BEAT);
            last = beat(&history, "gap", last);
        }
    });
}

/// Runs the heartbeat of the runtime, whose workers may be blocked.
pub(crate) async fn of_the_runtime(history: Arc<History>) {
    let mut last = now();
    loop {
        tokio::time::sleep(BEAT).await;
        last = beat(&history, "agap", last);
    }
}

/// Records a gap if the heartbeat after `last` is late. Returns the current time.
pub(crate) fn beat(history: &History, what: &str, last: u64) -> u64 {
    let time = now();
    if time - last > LATE {
        history.write_at(time, format_args!("{what} {last}"));
    }
    time
}
