//! Log events of the client's own thread, emitted by another thread, which may block.
//!
//! A subscriber is the user's code: its writer may hang on a full pipe or a slow disk. Renewals
//! must not wait for it, and it must not run while the client holds a mutex. So the client's thread
//! passes its events to one log thread per process, in order. Events that do not fit into the queue
//! are dropped: an event is worth less than a lease.

use std::{
    fmt::Display,
    sync::{
        OnceLock,
        mpsc::{SyncSender, sync_channel},
    },
    thread,
};

use tracing::{
    Level,
    field::{DisplayValue, display},
    level_filters::LevelFilter,
};

/// The length of the queue: how many events may wait for a subscriber that hangs.
const QUEUE: usize = 1024;

type LogEvent = Box<dyn FnOnce() + Send>;

/// Returns the queue of the log thread, which starts on first use. Returns `None` if it cannot
/// start.
fn teller() -> Option<&'static SyncSender<LogEvent>> {
    static TELLER: OnceLock<Option<SyncSender<LogEvent>>> = OnceLock::new();
    TELLER
        .get_or_init(|| {
            let (sender, events) = sync_channel::<LogEvent>(QUEUE);
            let tell = move || events.into_iter().for_each(|event| event());
            thread::Builder::new()
                .name("nestlock-log".into())
                .spawn(tell)
                .ok()?;
            Some(sender)
        })
        .as_ref()
}

/// Returns whether a subscriber may want events of this level. Calls no subscriber.
#[must_use]
pub fn is_heard(level: Level) -> bool {
    level <= LevelFilter::current()
}

/// Queues an event for the log thread. Drops it if the queue is full.
pub fn tell(event: impl FnOnce() + Send + 'static) {
    if let Some(teller) = teller() {
        let _ = teller.try_send(Box::new(event));
    }
}

/// A field that is logged as a number. A method call finds this trait before [`Text`], which needs
/// one more reference.
pub trait Number {
    fn told(&self) -> u64;
}

macro_rules! numbers {
    ($($number:ty),*) => {
        $(impl Number for $number {
            fn told(&self) -> u64 {
                u64::try_from(*self).unwrap_or(u64::MAX)
            }
        })*
    };
}
numbers!(u32, u64, u128, usize);

/// A field that is logged by its `Display`.
pub trait Text {
    fn told(&self) -> DisplayValue<String>;
}

impl<T: Display + ?Sized> Text for &T {
    fn told(&self) -> DisplayValue<String> {
        display(self.to_string())
    }
}

/// Logs an event from the log thread: `later!(WARN, lock = name, holds = 2; "lock lost")`. Fields
/// are logged as numbers, or by their `Display`.
#[macro_export]
#[doc(hidden)]
macro_rules! __later {
    ($level:ident, $($field:ident = $value:expr),*; $what:literal) => {
        if $crate::log::is_heard(tracing::Level::$level) {
            #[allow(unused_imports, reason = "not each event has fields of both sorts")]
            use $crate::log::{Number as _, Text as _};
            $(let $field = (&$value).told();)*
            $crate::log::tell(move || tracing::event!(tracing::Level::$level, $($field = $field,)* $what));
        }
    };
}
pub use __later as later;
