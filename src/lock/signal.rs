//! The signal lock: a string that names its owner, and a list that wakes one waiter for each
//! release. It has the format of the Python package python-redis-lock.

use std::{sync::Arc, time::Duration};

use nestlock_wire::{Call, Script, clock::millis};

use crate::{
    engine::{AcquireTerms, Kind, KindInfo, Wake},
    keys::{LockName, SIGNAL_LIST, SIGNAL_RECORD},
    options::SignalOptions,
    owner::OwnerId,
    store::script,
};

script!(ACQUIRE = "signal/acquire", keys = 1, args = 2);
script!(
    RELEASE = "signal/release",
    parts = ["tell_one"],
    keys = 2,
    args = 3
);
script!(RENEW = "signal/renew", parts = ["renew_each"], keys = 0 + 1 per_lock, args = 0 + 2 per_lock);
script!(
    FORCE_RELEASE = "signal/force_release",
    parts = ["tell_one"],
    keys = 2,
    args = 1
);
script!(
    SIGNAL = "signal/signal",
    parts = ["tell_one"],
    keys = 2,
    args = 1
);
script!(INSPECT = "signal/inspect", keys = 1, args = 0);

/// A string `lock:name` with the owner, and a list `lock-signal:name` of one element, which lives
/// for `signal_expire` (1 s by default).
#[derive(Debug)]
pub(crate) struct Signal {
    name: Arc<str>,
    record: Arc<str>,
    list: Arc<str>,
    options: SignalOptions,
}

impl Signal {
    pub(crate) fn new(name: &LockName, options: SignalOptions) -> Self {
        Self::named(name.as_arc(), options)
    }

    fn named(name: &Arc<str>, options: SignalOptions) -> Self {
        Self {
            name: Arc::clone(name),
            record: format!("{SIGNAL_RECORD}{name}").into(),
            list: format!("{SIGNAL_LIST}{name}").into(),
            options,
        }
    }

    /// Returns the lock whose record is at this key. Returns `None` if the key has another form.
    pub(crate) fn of_record(key: &str) -> Option<Self> {
        Some(Self::named(
            &key.strip_prefix(SIGNAL_RECORD)?.into(),
            SignalOptions::default(),
        ))
    }

    /// Returns the `SCAN` pattern of the records of all locks with this name prefix.
    pub(crate) fn records(prefix: &str) -> String {
        let mut pattern = SIGNAL_RECORD.to_owned();
        for letter in prefix.chars() {
            if "*?[]\\".contains(letter) {
                pattern.push('\\');
            }
            pattern.push(letter);
        }
        pattern.push('*');
        pattern
    }

    fn keys(&self) -> [Arc<str>; 2] {
        [Arc::clone(&self.record), Arc::clone(&self.list)]
    }

    /// Returns how long the list lives, in milliseconds.
    fn life(&self) -> u64 {
        millis(self.options.signal_expire)
    }
}

impl Kind for Signal {
    fn about(&self) -> KindInfo {
        KindInfo {
            reentrant: false,
            values: true,
            endless: !self.options.expires,
            ..KindInfo::plain("signal")
        }
    }

    fn name(&self) -> &Arc<str> {
        &self.name
    }

    fn record(&self) -> &Arc<str> {
        &self.record
    }

    fn wake(&self, _: &OwnerId) -> Wake {
        Wake::Signal(Arc::clone(&self.list))
    }

    fn signal(&self) -> Option<Call> {
        Some(Call::new(&SIGNAL, self.keys(), [self.life().into()]))
    }

    fn ring(&self, bell: &Arc<str>, life: Duration) -> Option<Call> {
        // No record has this name, so the script finds the "lock" free and pushes the element.
        let free = format!("{bell}:free").into();
        Some(Call::new(
            &SIGNAL,
            [free, Arc::clone(bell)],
            [millis(life).into()],
        ))
    }

    fn acquire(&self, terms: AcquireTerms<'_>) -> Call {
        Call::new(
            &ACQUIRE,
            [Arc::clone(&self.record)],
            [terms.owner.into(), terms.lease_ms.into()],
        )
    }

    fn release(&self, owner: &OwnerId, holds: u32) -> Call {
        Call::new(
            &RELEASE,
            self.keys(),
            [owner.into(), holds.into(), self.life().into()],
        )
    }

    /// Ignores `seen`: the record has no hold count.
    fn release_if(&self, owner: &OwnerId, holds: u32, _: u32) -> Call {
        self.release(owner, holds)
    }

    /// Wakes no waiter: this is used in a cluster only, where no waiter uses lists.
    fn release_record(&self, owner: &OwnerId, holds: u32) -> Option<Call> {
        (holds == 0).then(|| super::string::release(&self.record, owner))
    }

    /// The list only wakes waiters.
    fn record_is_all(&self) -> bool {
        true
    }

    fn transfer(&self, from: &OwnerId, to: &OwnerId, lease_ms: u64) -> Call {
        // The TTL of a signal record is in whole seconds, rounded up.
        super::string::transfer(&self.record, from, to, lease_ms.div_ceil(1000) * 1000)
    }

    fn renew(&self) -> &'static Script {
        &RENEW
    }

    fn force_release(&self) -> Call {
        Call::new(&FORCE_RELEASE, self.keys(), [self.life().into()])
    }

    fn inspect(&self) -> Call {
        Call::new(&INSPECT, [Arc::clone(&self.record)], [])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_no_pattern() {
        assert_eq!(Signal::records(""), "lock:*");
        assert_eq!(
            Signal::records("app:[1]*?\\"),
            "lock:app:\\[1\\]\\*\\?\\\\*"
        );
    }

    #[test]
    fn a_record_tells_its_lock() {
        let lock = Signal::of_record("lock:orders:7").unwrap();
        let keys: Vec<String> = lock
            .force_release()
            .keys
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(keys, ["lock:orders:7", "lock-signal:orders:7"]);
        assert_eq!(&**lock.name(), "orders:7");
        assert!(Signal::of_record("lock-signal:orders:7").is_none());
    }
}
