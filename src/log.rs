//! Events of the client's own thread, told by a thread that may block.
//!
//! A subscriber is the user's code: its writer may hang on a full pipe or a slow disk. Renewals must not wait for it, and
//! it must not run while one of our mutexes is held. So whatever the client's own thread has to say is handed to one
//! thread of the process, in order. What does not fit into its queue is dropped: an event is worth less than a lease.

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

/// A field that is told as a number. A method call finds this before [`Text`], which is one reference further away.
pub(crate) trait Number {
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

/// Any other field, by its `Display`.
pub(crate) trait Text {
    fn told(&self) -> DisplayValue<String>;
}

impl<T: Display + ?Sized> Text for &T {
    fn told(&self) -> DisplayValue<String> {
        display(self.to_string())
    }
}

/// `later!(WARN, lock = name, holds = 2; "lock lost")`: an event with these fields: numbers, or by their `Display`.
macro_rules! later {
    ($level:ident, $($field:ident = $value:expr),*; $what:literal) => {
        if $crate::log::is_heard(tracing::Level::$level) {
            #[allow(unused_imports, reason = "not each event has fields of both sorts")]
            use $crate::log::{Number as _, Text as _};
            $(let $field = (&$value).told();)*
            $crate::log::tell(move || tracing::event!(tracing::Level::$level, $($field = $field,)* $what));
        }
    };
}
pub(crate) use later;
