//! Several locks as one.

use crate::contract::contract_suite;

contract_suite! {
    mod contract,
    door = |client, name| {
        let members = [name.to_owned(), format!("{name}:2"), format!("{name}:3")];
        let members = members.map(|name| std::sync::Arc::new(client.reentrant_lock(name).unwrap()) as _);
        std::sync::Arc::new(client.multi_lock(members).unwrap())
    },
    one_record = false,
}
