//! Finds the program behind an owner, by the names of its client's connections.

use std::collections::HashMap;

use crate::{
    node::{is_denied, is_over, text},
    raw::Raw,
};

/// The program behind a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Whose {
    pub(crate) application: String,
    pub(crate) host: String,
    pub(crate) process: String,
    /// The age of its oldest connection in seconds: the client is at least as old.
    pub(crate) age: u64,
    pub(crate) address: String,
}

/// The programs by the IDs of their clients.
#[derive(Debug, Clone, Default)]
pub(crate) struct People {
    of_client: HashMap<String, Whose>,
    /// Why programs may be missing.
    pub(crate) unknown: Option<&'static str>,
}

impl People {
    /// Reads the client lists of all servers with locks: a client is connected to each server that
    /// has its locks.
    pub(crate) async fn ask(raw: &Raw<'_>) -> Self {
        let mut people = Self::default();
        for answer in raw.ask_each(&raw.masters(), &["CLIENT", "LIST"]).await {
            match answer {
                Ok(list) => read(&mut people.of_client, &text(&list).unwrap_or_default()),
                Err(error) if is_denied(&error) => {
                    people.unknown = Some(
                        "this user may not list the connections of clients; grant it +client|list",
                    );
                }
                // that server is already reported as away
                Err(error) if is_over(&error) => {}
                Err(_) => {
                    people.unknown = Some("the server does not list the connections of clients");
                }
            }
        }
        people
    }

    /// Returns the program behind this owner.
    pub(crate) fn of(&self, owner: &str) -> Option<&Whose> {
        self.of_client.get(owner.split_once(':')?.0)
    }
}

fn read(found: &mut HashMap<String, Whose>, list: &str) {
    for line in list.lines() {
        let field = |name: &str| {
            line.split(' ')
                .find_map(|field| field.strip_prefix(name)?.strip_prefix('='))
        };
        let Some(name) = field("name").and_then(|name| name.strip_prefix("nestlock:")) else {
            continue;
        };
        let parts: Vec<&str> = name.split(':').collect();
        let [application, host, process, client] = parts[..] else {
            continue;
        };
        let age = field("age").and_then(|age| age.parse().ok()).unwrap_or(0);
        let whose = found.entry(client.to_owned()).or_insert_with(|| Whose {
            application: application.to_owned(),
            host: host.to_owned(),
            process: process.to_owned(),
            age,
            address: field("addr").unwrap_or("-").to_owned(),
        });
        whose.age = whose.age.max(age);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_known_by_the_names_of_its_connections() {
        let mut found = HashMap::new();
        read(
            &mut found,
            "id=3 addr=127.0.0.1:50 laddr=x name=nestlock:shop:web-1:77:c-1 age=5 idle=0\n\
             id=4 addr=127.0.0.1:51 laddr=x name=nestlock:shop:web-1:77:c-1 age=9 idle=0\n\
             id=5 addr=127.0.0.1:52 laddr=x name= age=9 idle=0\n\
             id=6 addr=127.0.0.1:53 laddr=x name=nestlock:odd age=9 idle=0\n",
        );
        assert_eq!(found.len(), 1);
        let whose = &found["c-1"];
        assert_eq!(
            (
                &*whose.application,
                &*whose.host,
                &*whose.process,
                whose.age
            ),
            ("shop", "web-1", "77", 9)
        );
    }
}
