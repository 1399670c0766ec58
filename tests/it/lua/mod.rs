//! Tests of single scripts, sent as text over a plain connection, without nestlock's own code.

mod fair;
mod fair_mixed;
mod fair_permits;
mod fenced;
mod latch;
mod note;
mod permits;
mod read_write;
mod reentrant;
mod refused;
mod semaphore;
mod signal;
mod string;
mod transfer;

use std::{cell::RefCell, time::Instant};

pub use crate::support::scripts::source;
use crate::support::{
    Server,
    wire::{Reply, Wire},
};

/// Invalid leases: zero, negative, not a number, not whole, or more than the server can count.
pub const NO_LEASES: [&str; 16] = [
    "0",
    "-1",
    "-30000",
    "",
    "x",
    "1.5",
    "0.4",
    "1e3",
    "0x10",
    " 10",
    "10 ",
    "nan",
    "inf",
    "9223372036854775807",
    "9223372036854775808",
    "99999999999999999999999",
];
pub const NO_COUNTS: [&str; 10] = [
    "-1", "", "x", "1.5", "0.4", "1e3", "0x10", " 1", "nan", "inf",
];

/// The reply of every acquire script for "acquired".
pub const ACQUIRED: Reply = Reply::Int(1);

/// Returns the reply of an acquire script for "busy"; a `ttl` of -1 means that the record has no
/// TTL.
pub fn busy(ttl: i64) -> Reply {
    Reply::List(vec![Reply::Int(0), Reply::Int(ttl)])
}

/// Returns the TTL of such a reply.
pub fn busy_ttl(reply: &Reply) -> i64 {
    let [Reply::Int(0), ttl] = reply.list() else {
        panic!("not busy: {reply:?}")
    };
    ttl.int()
}

/// Returns the arguments of a renew script: one lease for all owners.
pub fn leases<'a>(owners: &[&'a str], lease: &'a str) -> Vec<&'a str> {
    owners.iter().flat_map(|owner| [*owner, lease]).collect()
}

/// A server, and a connection that runs scripts on it.
pub struct Bench {
    pub server: Server,
    wire: RefCell<Wire>,
}

impl Bench {
    /// Connects as a user who may run every command but `denied`.
    pub fn limited(&self, denied: &str) -> Wire {
        self.set_up(&[
            "ACL",
            "SETUSER",
            "limited",
            "reset",
            "on",
            ">pw",
            "~*",
            "&*",
            "+@all",
            &format!("-{denied}"),
        ]);
        let mut wire = self.server.wire();
        wire.call(&["AUTH", "limited", "pw"]).unwrap();
        wire
    }

    pub fn new() -> Self {
        Self::on(Server::start())
    }

    /// Starts a real server, for features that the embedded one lacks.
    pub fn real() -> Self {
        Self::on(Server::start_real())
    }

    fn on(server: Server) -> Self {
        let wire = RefCell::new(server.wire());
        Self { server, wire }
    }

    pub fn call(&self, parts: &[&str]) -> Reply {
        self.wire.borrow_mut().call(parts).expect("a reply")
    }

    /// Runs a set-up step, which must not fail.
    pub fn set_up(&self, parts: &[&str]) {
        let reply = self.call(parts);
        assert!(!reply.is_error(), "{parts:?}: {reply:?}");
    }

    /// Runs the current text of `lua/<script>.lua`.
    pub fn run(&self, script: &str, keys: &[&str], args: &[&str]) -> Reply {
        let reply = self.call(
            &eval(&source(script), keys, args)
                .iter()
                .map(String::as_str)
                .collect::<Vec<_>>(),
        );
        match reply {
            // Redis 6 wraps it: `ERR Error running script (call to f_30ad..): @user_script:11: OOM
            // command not allowed`
            Reply::Error(text) if text.starts_with("ERR Error running script ") => {
                let inside = text
                    .rsplit_once("@user_script: ")
                    .or_else(|| text.rsplit_once("@user_script:"));
                let said = inside
                    .and_then(|(_, rest)| rest.split_once(": "))
                    .map_or(&*text, |(_, said)| said);
                Reply::Error(said.trim_start_matches('-').to_owned())
            }
            reply => reply,
        }
    }

    /// Returns every key with its value and expiry time: equal snapshots mean that nothing was
    /// written in between.
    pub fn snapshot(&self) -> Vec<(String, Reply, i64)> {
        self.server.dump()
    }

    /// Runs a script that must change nothing, and returns its reply.
    pub fn untouched(&self, script: &str, keys: &[&str], args: &[&str]) -> Reply {
        let before = self.snapshot();
        let reply = self.run(script, keys, args);
        assert_eq!(
            self.snapshot(),
            before,
            "{script} {keys:?} {args:?} replied {reply:?} and touched something"
        );
        reply
    }

    /// Like [`Bench::untouched`], for calls that must be refused with an error.
    pub fn refused(&self, script: &str, keys: &[&str], args: &[&str]) -> String {
        let reply = self.untouched(script, keys, args);
        assert!(
            reply.is_error(),
            "{script} {keys:?} {args:?} replied {reply:?}"
        );
        reply.text().to_owned()
    }

    /// Asserts that the server refuses the call while it has no memory. For a real server.
    pub fn refused_without_memory(&self, script: &str, keys: &[&str], args: &[&str]) {
        self.set_up(&["CONFIG", "SET", "maxmemory", "1"]);
        let error = self.refused(script, keys, args);
        // Redis 6 puts more text before it
        assert!(error.contains("OOM "), "{error}");
        self.set_up(&["CONFIG", "SET", "maxmemory", "0"]);
    }

    /// Returns the server's clock, in milliseconds since 1970.
    pub fn now(&self) -> i64 {
        self.server.now()
    }

    pub fn expires(&self, key: &str) -> i64 {
        self.server.expires(key)
    }

    /// Asserts that renewals since then have left this longer TTL as it was. Each renewal reads the
    /// TTL and sets it again, which adds the time that passes in between.
    pub fn assert_left(&self, key: &str, (since, expires): (Instant, i64), renewals: i64) {
        let more = self.expires(key) - expires;
        let most = i64::try_from(since.elapsed().as_millis()).unwrap() + renewals;
        assert!(
            (0..=most).contains(&more),
            "a longer TTL is never shortened: {more} ms more, {most} at most"
        );
    }

    /// Asserts that every key has a TTL.
    pub fn assert_every_key_expires(&self) {
        for (key, _, expires) in self.snapshot() {
            assert!(expires > 0, "{key:?} has no TTL");
        }
    }

    pub fn listen(&self, channel: &str) -> Ears {
        let mut wire = self.server.wire();
        assert!(!wire.call(&["SUBSCRIBE", channel]).unwrap().is_error());
        Ears {
            wire,
            channel: channel.to_owned(),
        }
    }
}

/// A subscription to one channel.
pub struct Ears {
    wire: Wire,
    channel: String,
}

impl Ears {
    /// Returns the messages since the last call. Does not wait: a message of its own marks the end.
    pub fn heard(&mut self, bench: &Bench) -> Vec<String> {
        bench.set_up(&["PUBLISH", &self.channel, "end"]);
        let mut heard = Vec::new();
        loop {
            let message = self.wire.read().unwrap();
            let [kind, channel, payload] = message.list() else {
                panic!("{message:?}")
            };
            assert_eq!((kind.text(), channel.text()), ("message", &*self.channel));
            match payload.text() {
                "end" => return heard,
                payload => heard.push(payload.to_owned()),
            }
        }
    }
}

/// Returns the command that runs a script's text.
pub fn eval(source: &str, keys: &[&str], args: &[&str]) -> Vec<String> {
    let count = keys.len().to_string();
    ["EVAL", source, &count]
        .iter()
        .chain(keys)
        .chain(args)
        .map(ToString::to_string)
        .collect()
}
