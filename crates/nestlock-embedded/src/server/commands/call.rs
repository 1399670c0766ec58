//! One execution of a command: the server, the words and the client, and how commands read them.

use std::collections::VecDeque;

use indexmap::IndexMap;

use super::{
    error_text::{NOT_A_FLOAT, NOT_AN_INTEGER, NOT_POSITIVE, WRONG_TYPE, wrong_number},
    float::float,
};
use crate::server::{
    client::Client,
    keyspace::{Hash, Value},
    resp::{Outcome, Protocol, integer},
    sorted_set::SortedSet,
    state::Server,
};

/// One execution of a command.
pub(crate) struct Call<'a> {
    pub(crate) server: &'a mut Server,
    pub(crate) client: u64,
    /// The current database; SELECT changes it.
    pub(crate) db: usize,
    /// All words, starting with the command's name.
    pub(crate) args: &'a [Vec<u8>],
    /// Whether a script called it.
    pub(crate) in_script: bool,
    /// The protocol of the reply.
    pub(crate) protocol: Protocol,
    /// The command's name in lower case, for error texts.
    pub(crate) name: &'static str,
}

impl Call<'_> {
    pub(super) fn int(&self, at: usize) -> Result<i64, String> {
        integer(&self.args[at]).ok_or_else(|| NOT_AN_INTEGER.into())
    }

    pub(super) fn positive(&self, at: usize) -> Result<usize, String> {
        let number = integer(&self.args[at]).and_then(|number| usize::try_from(number).ok());
        number.ok_or_else(|| NOT_POSITIVE.into())
    }

    pub(super) fn float(&self, at: usize) -> Result<f64, String> {
        float(&self.args[at]).ok_or_else(|| NOT_A_FLOAT.into())
    }

    /// Returns whether the word is this option, ignoring case.
    pub(super) fn is(&self, at: usize, option: &str) -> bool {
        self.args[at].eq_ignore_ascii_case(option.as_bytes())
    }

    pub(super) fn wrong_number(&self) -> String {
        wrong_number(self.name)
    }

    pub(super) fn now(&self) -> i64 {
        self.server.clock.now_ms()
    }

    /// Returns the client that sent the command or the script. It stays connected while the command
    /// runs.
    pub(super) fn client_mut(&mut self) -> &mut Client {
        self.server
            .clients
            .get_mut(&self.client)
            .expect("a client that sends commands")
    }

    pub(super) fn speaks_resp3(&self) -> bool {
        self.protocol == Protocol::Resp3
    }

    pub(super) fn delete(&mut self, key: &[u8]) -> bool {
        self.server.keys.take(self.db, key).is_some()
    }

    pub(super) fn string(&self, key: &[u8]) -> Result<Option<&Vec<u8>>, String> {
        match self.server.keys.get(self.db, key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(WRONG_TYPE.into()),
        }
    }

    pub(super) fn hash(&self, key: &[u8]) -> Result<Option<&Hash>, String> {
        match self.server.keys.get(self.db, key) {
            None => Ok(None),
            Some(Value::Hash(hash)) => Ok(Some(hash)),
            Some(_) => Err(WRONG_TYPE.into()),
        }
    }

    pub(super) fn hash_or_new(&mut self, key: &[u8]) -> Result<&mut Hash, String> {
        match self
            .server
            .keys
            .get_or_insert(self.db, key, || Value::Hash(IndexMap::new()))
        {
            Value::Hash(hash) => Ok(hash),
            _ => Err(WRONG_TYPE.into()),
        }
    }

    pub(super) fn list(&self, key: &[u8]) -> Result<Option<&VecDeque<Vec<u8>>>, String> {
        match self.server.keys.get(self.db, key) {
            None => Ok(None),
            Some(Value::List(list)) => Ok(Some(list)),
            Some(_) => Err(WRONG_TYPE.into()),
        }
    }

    /// Returns a list to change. Call [`Call::tidy`] afterwards.
    pub(super) fn list_mut(
        &mut self,
        key: &[u8],
    ) -> Result<Option<&mut VecDeque<Vec<u8>>>, String> {
        match self.server.keys.get_mut(self.db, key) {
            None => Ok(None),
            Some(Value::List(list)) => Ok(Some(list)),
            Some(_) => Err(WRONG_TYPE.into()),
        }
    }

    pub(super) fn sorted_set(&self, key: &[u8]) -> Result<Option<&SortedSet>, String> {
        match self.server.keys.get(self.db, key) {
            None => Ok(None),
            Some(Value::SortedSet(set)) => Ok(Some(set)),
            Some(_) => Err(WRONG_TYPE.into()),
        }
    }

    pub(super) fn sorted_set_or_new(&mut self, key: &[u8]) -> Result<&mut SortedSet, String> {
        match self.server.keys.get_or_insert(
            self.db,
            key,
            || Value::SortedSet(SortedSet::default()),
        ) {
            Value::SortedSet(set) => Ok(set),
            _ => Err(WRONG_TYPE.into()),
        }
    }

    pub(super) fn tidy(&mut self, key: &[u8]) {
        self.server.keys.tidy(self.db, key);
    }
}

/// Runs a command other than a script command.
pub(crate) fn run(
    server: &mut Server,
    client: u64,
    db: &mut usize,
    args: &[Vec<u8>],
    (name, run): (&'static str, fn(&mut Call) -> Outcome),
    (in_script, protocol): (bool, Protocol),
) -> Outcome {
    let now = server.clock.now_ms();
    server.stats.expired += server.keys.expire(now);
    let mut call = Call {
        server,
        client,
        db: *db,
        args,
        in_script,
        protocol,
        name,
    };
    let outcome = run(&mut call);
    *db = call.db;
    server.stats.count(name, &outcome);
    outcome
}
