//! Signal locks: python-redis-lock's records, and one waiter woken for each release.

use crate::contract::contract_suite;

contract_suite! {
    mod contract, door = |client, name| std::sync::Arc::new(client.signal_lock(name).unwrap()),
    reentrant = false, signals = true
}
