//! What is special about this kind.

use crate::contract::contract_suite;

contract_suite! { mod contract, door = |client, name| std::sync::Arc::new(client.spin_lock(name).unwrap()), listens = false }
