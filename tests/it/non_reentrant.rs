//! What is special about this kind.

use crate::contract::contract_suite;

contract_suite! { mod contract, door = |client, name| std::sync::Arc::new(client.non_reentrant_lock(name).unwrap()), reentrant = false }
