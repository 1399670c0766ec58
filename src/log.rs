//! Events of the client's own thread, told by a thread that may block.
//!
//! A subscriber is the user's code: its writer may hang on a full pipe or a slow disk. Renewals must not wait for it, and
//! it must not run while one of our mutexes is held. So whatever the client's own thread has to say is handed to one
//! thread of the process, in order. What does not fit into its queue is dropped: an event is worth less than a lease.

use std::{
    sync::{
        OnceLock,
        mpsc::{SyncSender, sync_channel},
    },
    thread,
};

use tracing::{Level, level_filters::LevelFilter};

/// Events that may wait for a subscriber that hangs.
const QUEUE: usize = 1024;

type Event = Box<dyn FnOnce() + Send>;

fn teller() -> Option<&'static SyncSender<Event>> {
    static TELLER: OnceLock<Option<SyncSender<Event>>> = OnceLock::new();
    TELLER
        .get_or_init(|| {
            let (sender, events) = sync_channel::<Event>(QUEUE);
            let tell = move || events.into_iter().for_each(|event| event());
            thread::Builder::new().name("nestlock-log".into()).spawn(tell).ok()?;
            Some(sender)
        })
        .as_ref()
}

/// Whether anybody listens to events of this level. Asks no subscriber.
pub(crate) fn is_heard(level: Level) -> bool {
    level <= LevelFilter::current()
}

pub(crate) fn tell(event: impl FnOnce() + Send + 'static) {
    if let Some(teller) = teller() {
        let _ = teller.try_send(Box::new(event));
    }
}

/// `later!(WARN, lock = name, error = error; "cannot settle")`: an event with these fields, by their `Display`.
macro_rules! later {
    ($level:ident, $($field:ident = $value:expr),*; $what:literal) => {
        if $crate::log::is_heard(tracing::Level::$level) {
            $(let $field = $value.to_string();)*
            $crate::log::tell(move || tracing::event!(tracing::Level::$level, $($field = %$field,)* $what));
        }
    };
}
pub(crate) use later;
