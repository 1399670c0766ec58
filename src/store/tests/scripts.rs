//! The shipped scripts as functions from one record to the next, run by the embedded server in this
//! process.

use std::{cell::RefCell, collections::HashMap, sync::Arc, time::Duration};

use nestlock_embedded::simulated::{Connection, Machine};
use nestlock_wire::{Arg, Call, Value};

use crate::store::{Acquired, Released, Renewed, reply};

/// The unit of TTLs, which are rounded up to a multiple of it: the server's clock keeps running
/// while a script does.
pub(crate) const GRAIN: Duration = Duration::from_secs(1_000);

/// The record of a plain reentrant lock.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Record {
    pub(crate) owner: Arc<str>,
    pub(crate) count: u32,
    pub(crate) ttl: Duration,
}

/// Runs an acquire script on the record.
pub(crate) fn acquire(record: &mut Option<Record>, call: &Call) -> Acquired {
    reply::acquired(&run(record, call)).expect("a reply")
}

pub(crate) fn release(record: &mut Option<Record>, call: &Call) -> Released {
    reply::released(&run(record, call)).expect("a reply")
}

pub(crate) fn renew(record: &mut Option<Record>, call: &Call) -> Renewed {
    reply::renewed(&run(record, call), 1).expect("a reply")[0]
}

/// A record, a script's name, and its arguments.
type Question = (Option<Record>, &'static str, Vec<String>);

struct Server {
    connection: Connection,
    /// The results of earlier calls, which recur many times.
    known: HashMap<Question, (Option<Record>, Value)>,
}

thread_local! {
    static SERVER: RefCell<Server> =
        RefCell::new(Server { connection: Machine::new().connect(), known: HashMap::new() });
}

/// Runs a script on one record.
fn run(record: &mut Option<Record>, call: &Call) -> Value {
    let args = call.args.iter().map(|arg| match arg {
        Arg::Text(text) => text.to_string(),
        Arg::Derived(lock) => (call.script.derive)(lock).concat(),
        Arg::Number(number) => number.to_string(),
        Arg::Bytes(_) => unreachable!("a guarded key is no lock"),
    });
    let question = (record.clone(), call.script.source.name, args.collect());
    SERVER.with_borrow_mut(|Server { connection, known }| {
        let (after, answer) = known
            .entry(question)
            .or_insert_with_key(|(before, _, args)| {
                set(connection, &call.keys[0], before.as_ref());
                let eval = ["EVAL", call.script.source.lua, "1", &call.keys[0]].into_iter();
                let answer = ask(
                    connection,
                    &eval
                        .chain(args.iter().map(String::as_str))
                        .collect::<Vec<_>>(),
                );
                (get(connection, &call.keys[0]), answer)
            });
        record.clone_from(after);
        answer.clone()
    })
}

fn set(connection: &mut Connection, key: &str, record: Option<&Record>) {
    ask(connection, &["DEL", key]);
    if let Some(Record { owner, count, ttl }) = record {
        ask(connection, &["HSET", key, owner, &count.to_string()]);
        ask(connection, &["PEXPIRE", key, &ttl.as_millis().to_string()]);
    }
}

fn get(connection: &mut Connection, key: &str) -> Option<Record> {
    let Value::Array(fields) = ask(connection, &["HGETALL", key]) else {
        unreachable!("a list")
    };
    let [owner, count] = &fields[..] else {
        assert!(fields.is_empty(), "one owner: {fields:?}");
        return None;
    };
    let left = ask(connection, &["PTTL", key])
        .as_number()
        .and_then(|left| u64::try_from(left).ok())
        .expect("a TTL");
    let ttl = GRAIN * u32::try_from(left.div_ceil(GRAIN.as_millis() as u64)).unwrap();
    let count = count
        .as_number()
        .and_then(|count| u32::try_from(count).ok())
        .expect("a count");
    Some(Record {
        owner: owner.as_str().unwrap().into(),
        count,
        ttl,
    })
}

/// Sends one command, and returns its reply.
fn ask(connection: &mut Connection, words: &[&str]) -> Value {
    let words = words
        .iter()
        .map(|word| format!("${}\r\n{word}\r\n", word.len()));
    connection.feed(format!("*{}\r\n{}", words.len(), words.collect::<String>()).as_bytes());
    let reply = connection.output();
    Value::decode(&reply).unwrap_or_else(|| panic!("{}", String::from_utf8_lossy(&reply)))
}
