//! What is special about this kind.

use crate::contract::contract_suite;

contract_suite! { mod contract, door = |client, name| std::sync::Arc::new(client.fair_lock(name).unwrap()) }
