//! `lua/read_write`: each line under "Returns", each refusal, each script sent twice.

use super::{ACQUIRED, Bench, NO_COUNTS, NO_LEASES, busy, busy_ttl, eval, leases, source};
use crate::support::wire::Reply;

const LOCK: &str = "orders:7";
const INTENT: &str = "nestlock_rwlock_intent:{orders:7}";
const CHANNEL: &str = "redisson_rwlock:{orders:7}";
const HOLDS: &str = "{orders:7}:";
const A: &str = "0a1b2c3d-1111-4222-8333-444455556666:42";
const B: &str = "0a1b2c3d-1111-4222-8333-444455556666:43";
const C: &str = "0a1b2c3d-1111-4222-8333-444455556666:44";
const D: &str = "0a1b2c3d-1111-4222-8333-444455556666:45";

const READ: &str = "read_write/read_acquire";
const READ_RELEASE: &str = "read_write/read_release";
const READ_RENEW: &str = "read_write/read_renew";
const READ_INSPECT: &str = "read_write/read_inspect";
const WRITE: &str = "read_write/write_acquire";
const WRITE_RELEASE: &str = "read_write/write_release";
const WRITE_RENEW: &str = "read_write/write_renew";
const FORCE: &str = "read_write/force_release";
const WRITE_INSPECT: &str = "read_write/write_inspect";

const READERS: &str = "nestlock_rwlock_readers:{orders:7}";
const KEYS: [&str; 3] = [LOCK, INTENT, READERS];
/// The keys of a release by a reader and by a writer.
const RELEASES: [[&str; 2]; 2] = [[LOCK, READERS], [LOCK, INTENT]];
/// The argument of an acquire that waits, and of one that tries.
const WAITS: &str = "1";
const TRIES: &str = "0";
/// The TTL of a waiter's mark, in milliseconds.
const PATIENCE: &str = "2000";

fn keys_of(owner: &str) -> String {
    format!("{HOLDS}{owner}:rwlock_timeout:")
}

fn hold_key(owner: &str, n: u32) -> String {
    format!("{}{n}", keys_of(owner))
}

fn about(left: i64, lease: i64) -> bool {
    left > lease - 5_000 && left <= lease
}

/// A script on this lock, with its keys and arguments.
type Step = (&'static str, Vec<&'static str>, Vec<String>);

/// Acquires the lock on one side.
type Side = fn(&Bench) -> Reply;

/// Returns every script with valid arguments.
fn every_script() -> Vec<Step> {
    let args = |args: &[&str]| args.iter().map(ToString::to_string).collect::<Vec<_>>();
    vec![
        (
            READ,
            KEYS.to_vec(),
            args(&[A, "30000", "1", &keys_of(A), WAITS]),
        ),
        (
            READ_RELEASE,
            RELEASES[0].to_vec(),
            args(&[A, "0", CHANNEL, HOLDS]),
        ),
        (
            READ_RELEASE,
            RELEASES[0].to_vec(),
            args(&[A, "1", CHANNEL, HOLDS]),
        ),
        (READ_RENEW, vec![LOCK], args(&[A, "30000"])),
        (FORCE, vec![LOCK], args(&[CHANNEL, HOLDS, "read"])),
        (READ_INSPECT, vec![LOCK], args(&[])),
        (WRITE, KEYS.to_vec(), args(&[A, "30000", "1", WAITS])),
        (
            WRITE_RELEASE,
            RELEASES[1].to_vec(),
            args(&[A, "0", CHANNEL, HOLDS]),
        ),
        (
            WRITE_RELEASE,
            RELEASES[1].to_vec(),
            args(&[A, "1", CHANNEL, HOLDS]),
        ),
        (WRITE_RENEW, vec![LOCK], args(&[A, "30000"])),
        (FORCE, vec![LOCK], args(&[CHANNEL, HOLDS, "write"])),
        (WRITE_INSPECT, vec![LOCK], args(&[])),
    ]
}

fn texts(args: &[String]) -> Vec<&str> {
    args.iter().map(String::as_str).collect()
}

impl Bench {
    fn read(&self, owner: &str, lease: &str, holds: &str) -> Reply {
        self.run(READ, &KEYS, &[owner, lease, holds, &keys_of(owner), TRIES])
    }

    fn read_untouched(&self, owner: &str, lease: &str, holds: &str) -> Reply {
        self.untouched(READ, &KEYS, &[owner, lease, holds, &keys_of(owner), TRIES])
    }

    fn read_waits(&self, owner: &str, lease: &str) -> Reply {
        self.run(READ, &KEYS, &[owner, lease, "1", &keys_of(owner), WAITS])
    }

    /// Returns which writer a waiting reader precedes: see [`first`] and [`after`].
    fn turn(&self, owner: &str) -> Reply {
        self.call(&["ZSCORE", READERS, owner])
    }

    fn unread(&self, owner: &str, holds: &str) -> Reply {
        self.run(READ_RELEASE, &RELEASES[0], &[owner, holds, CHANNEL, HOLDS])
    }

    fn write(&self, owner: &str, lease: &str, holds: &str, waits: &str) -> Reply {
        self.run(WRITE, &KEYS, &[owner, lease, holds, waits])
    }

    fn write_untouched(&self, owner: &str, lease: &str, holds: &str, waits: &str) -> Reply {
        self.untouched(WRITE, &KEYS, &[owner, lease, holds, waits])
    }

    fn unwrite(&self, owner: &str, holds: &str) -> Reply {
        self.run(WRITE_RELEASE, &RELEASES[1], &[owner, holds, CHANNEL, HOLDS])
    }

    fn clear(&self) {
        self.set_up(&["FLUSHALL"]);
    }

    fn left(&self, key: &str) -> i64 {
        self.server.pttl(key)
    }

    /// Returns the fields of the record, in alphabetical order.
    fn fields(&self) -> Vec<(String, String)> {
        let reply = self.call(&["HGETALL", LOCK]);
        let mut fields: Vec<_> = reply
            .list()
            .chunks(2)
            .map(|pair| (pair[0].text().into(), pair[1].text().into()))
            .collect();
        fields.sort();
        fields
    }

    fn assert_fields(&self, wanted: &[(&str, &str)]) {
        let fields = self.fields();
        let found: Vec<_> = fields
            .iter()
            .map(|(field, value)| (&**field, &**value))
            .collect();
        assert_eq!(found, wanted);
    }

    /// Sends the same request twice; the second one must change nothing but TTLs that count from
    /// now.
    fn twice(&self, mut send: impl FnMut(&Self) -> Reply) -> Reply {
        let first = send(self);
        let content = || -> Vec<_> {
            self.server
                .dump()
                .into_iter()
                .map(|(key, value, _)| (key, value))
                .collect()
        };
        let before = content();
        let second = send(self);
        assert_eq!(content(), before, "sent twice");
        assert_eq!(first, second, "sent twice");
        first
    }
}

// --- reading ---

/// A read acquire of a free lock replies 1, and writes the record and the hold.
#[test]
fn read_acquire_of_a_free_lock_writes_the_record_and_the_hold() {
    let bench = Bench::new();
    assert_eq!(bench.twice(|bench| bench.read(A, "30000", "1")), ACQUIRED);
    bench.assert_fields(&[(A, "1"), ("mode", "read")]);
    assert!(about(bench.left(LOCK), 30_000) && about(bench.left(&hold_key(A, 1)), 30_000));
    assert_eq!(
        bench.call(&["GET", &hold_key(A, 1)]),
        Reply::Text("1".into())
    );
    assert_eq!(bench.snapshot().len(), 2, "nothing but record and hold");
}

#[test]
fn read_acquire_joins_readers_and_keeps_the_longest_ttl() {
    let bench = Bench::new();
    assert_eq!(bench.read(A, "60000", "1"), ACQUIRED);
    assert_eq!(bench.twice(|bench| bench.read(B, "20000", "1")), ACQUIRED);
    bench.assert_fields(&[(A, "1"), (B, "1"), ("mode", "read")]);
    assert!(about(bench.left(LOCK), 60_000) && about(bench.left(&hold_key(B, 1)), 20_000));
    assert_eq!(bench.twice(|bench| bench.read(A, "90000", "2")), ACQUIRED);
    bench.assert_fields(&[(A, "2"), (B, "1"), ("mode", "read")]);
    assert!(
        about(bench.left(&hold_key(A, 1)), 60_000) && about(bench.left(&hold_key(A, 2)), 90_000)
    );
    assert!(about(bench.left(LOCK), 90_000));
    bench.assert_every_key_expires();
}

/// A read acquire inside its own write replies 1, and during another owner's write it replies the
/// TTL of that.
#[test]
fn read_acquire_returns_1_in_its_own_write_or_anothers_ttl() {
    let bench = Bench::new();
    assert_eq!(bench.write(A, "30000", "1", TRIES), ACQUIRED);
    for _ in 0..2 {
        assert!(about(
            busy_ttl(&bench.read_untouched(B, "60000", "1")),
            30_000
        ));
    }
    assert_eq!(bench.twice(|bench| bench.read(A, "60000", "1")), ACQUIRED);
    bench.assert_fields(&[(A, "1"), (&format!("{A}:write"), "1"), ("mode", "write")]);
    assert!(about(bench.left(LOCK), 60_000));
}

/// A read acquire waits for a waiting writer, unless its owner reads or writes already.
#[test]
fn read_acquire_awaits_a_waiting_writer_unless_it_already_holds() {
    let bench = Bench::new();
    assert_eq!(bench.read(A, "60000", "1"), ACQUIRED);
    bench.set_up(&["SET", INTENT, B, "PX", PATIENCE]);
    let left = busy_ttl(&bench.read_untouched(B, "30000", "1"));
    assert!((1..=2_000).contains(&left), "{left}");
    assert_eq!(bench.read(A, "60000", "2"), ACQUIRED, "reads already");
    // the intent still counts after the record has ended
    bench.set_up(&["DEL", LOCK]);
    assert!(busy_ttl(&bench.read_untouched(B, "30000", "1")) > 0);
    bench.clear();
    assert_eq!(bench.write(A, "60000", "1", TRIES), ACQUIRED);
    bench.set_up(&["SET", INTENT, B, "PX", PATIENCE]);
    assert_eq!(bench.read(A, "60000", "1"), ACQUIRED, "writes already");
}

#[test]
fn acquire_of_a_second_hold_without_a_first_returns_lost() {
    let bench = Bench::new();
    assert_eq!(bench.read_untouched(A, "30000", "2"), Reply::Int(-2));
    assert_eq!(
        bench.write_untouched(A, "30000", "2", WAITS),
        Reply::Int(-2)
    );
    let sides: [Side; 2] = [
        |bench| bench.read(B, "30000", "1"),
        |bench| bench.write(B, "30000", "1", TRIES),
    ];
    for set_up in sides {
        bench.clear();
        assert_eq!(set_up(&bench), ACQUIRED);
        assert_eq!(bench.read_untouched(A, "30000", "2"), Reply::Int(-2));
        assert_eq!(
            bench.write_untouched(A, "30000", "2", WAITS),
            Reply::Int(-2)
        );
    }
}

#[test]
fn read_release_of_the_last_hold_returns_1_and_says_so_once() {
    let bench = Bench::new();
    let mut ears = bench.listen(CHANNEL);
    for holds in ["1", "2"] {
        assert_eq!(bench.read(A, "30000", "1"), ACQUIRED);
        assert_eq!(bench.read(A, "30000", holds), ACQUIRED);
        assert_eq!(bench.unread(A, "0"), Reply::Int(1));
        assert_eq!(bench.snapshot(), []);
        assert_eq!(bench.unread(A, "0"), Reply::Nil, "sent twice");
        assert_eq!(bench.snapshot(), []);
        assert_eq!(ears.heard(&bench), ["1"]);
    }
}

#[test]
fn read_release_of_one_hold_hands_the_longest_ttl_down() {
    let bench = Bench::new();
    let mut ears = bench.listen(CHANNEL);
    for (holds, lease) in [("1", "20000"), ("2", "30000"), ("3", "60000")] {
        assert_eq!(bench.read(A, lease, holds), ACQUIRED);
    }
    assert_eq!(bench.twice(|bench| bench.unread(A, "2")), Reply::Int(0));
    bench.assert_fields(&[(A, "2"), ("mode", "read")]);
    assert!(
        about(bench.left(&hold_key(A, 1)), 20_000) && about(bench.left(&hold_key(A, 2)), 60_000)
    );
    assert_eq!(bench.left(&hold_key(A, 3)), -2);
    assert_eq!(
        bench.twice(|bench| bench.unread(A, "9")),
        Reply::Int(0),
        "a release never adds holds"
    );
    bench.assert_fields(&[(A, "2"), ("mode", "read")]);
    assert_eq!(bench.twice(|bench| bench.unread(A, "1")), Reply::Int(0));
    assert!(about(bench.left(&hold_key(A, 1)), 60_000) && about(bench.left(LOCK), 60_000));
    assert_eq!(ears.heard(&bench), [] as [&str; 0]);
}

/// R68, R72: the record ends with the longest of the remaining holds; the last living reader also
/// deletes the dead ones.
#[test]
fn r68_r72_read_release_counts_the_holds_that_are_left() {
    let bench = Bench::new();
    let mut ears = bench.listen(CHANNEL);
    assert_eq!(bench.read(A, "60000", "1"), ACQUIRED);
    assert_eq!(bench.read(B, "20000", "1"), ACQUIRED);
    assert_eq!(bench.read(B, "30000", "2"), ACQUIRED);
    // a late request, from before the second hold
    assert_eq!(bench.read(B, "20000", "1"), ACQUIRED);
    assert_eq!(bench.unread(A, "0"), Reply::Int(0));
    bench.assert_fields(&[(B, "2"), ("mode", "read")]);
    assert!(about(bench.left(LOCK), 30_000));
    // B is dead: its holds have expired
    assert_eq!(bench.read(A, "60000", "1"), ACQUIRED);
    bench.set_up(&["DEL", &hold_key(B, 1), &hold_key(B, 2)]);
    assert_eq!(ears.heard(&bench), [] as [&str; 0]);
    assert_eq!(bench.unread(A, "0"), Reply::Int(1));
    assert_eq!(bench.snapshot(), []);
    assert_eq!(ears.heard(&bench), ["1"]);
}

#[test]
fn read_release_inside_the_own_write_leaves_the_write() {
    let bench = Bench::new();
    let mut ears = bench.listen(CHANNEL);
    assert_eq!(bench.write(A, "60000", "1", TRIES), ACQUIRED);
    for holds in ["1", "2"] {
        assert_eq!(bench.read(A, "20000", holds), ACQUIRED);
    }
    let expires = bench.expires(LOCK);
    assert_eq!(bench.twice(|bench| bench.unread(A, "1")), Reply::Int(0));
    assert_eq!(bench.unread(A, "0"), Reply::Int(0));
    bench.assert_fields(&[(&format!("{A}:write"), "1"), ("mode", "write")]);
    assert_eq!(
        bench.expires(LOCK),
        expires,
        "the lease of the write is untouched"
    );
    assert_eq!(bench.unread(A, "0"), Reply::Nil);
    assert_eq!(ears.heard(&bench), [] as [&str; 0]);
}

#[test]
fn release_by_another_owner_returns_nil() {
    let bench = Bench::new();
    let mut ears = bench.listen(CHANNEL);
    let sides: [Side; 2] = [
        |bench| bench.read(A, "30000", "1"),
        |bench| bench.write(A, "30000", "1", TRIES),
    ];
    for set_up in sides {
        assert_eq!(set_up(&bench), ACQUIRED);
        for holds in ["0", "1"] {
            assert_eq!(
                bench.untouched(READ_RELEASE, &RELEASES[0], &[B, holds, CHANNEL, HOLDS]),
                Reply::Nil
            );
            assert_eq!(
                bench.untouched(WRITE_RELEASE, &RELEASES[1], &[B, holds, CHANNEL, HOLDS]),
                Reply::Nil
            );
        }
        assert_eq!(ears.heard(&bench), [] as [&str; 0]);
        bench.clear();
    }
    assert_eq!(bench.read(A, "30000", "1"), ACQUIRED);
    assert_eq!(
        bench.untouched(WRITE_RELEASE, &RELEASES[1], &[A, "0", CHANNEL, HOLDS]),
        Reply::Nil,
        "A reads, and does not write"
    );
    bench.clear();
    assert_eq!(bench.write(A, "30000", "1", TRIES), ACQUIRED);
    assert_eq!(
        bench.untouched(READ_RELEASE, &RELEASES[0], &[A, "0", CHANNEL, HOLDS]),
        Reply::Nil,
        "and vice versa"
    );
}

/// Reads as a Redisson process with a watchdog would: a field, a key for each hold, and the record
/// set to its lease.
fn redisson_reads(bench: &Bench, owner: &str, holds: u32, lease: &str) {
    bench.set_up(&["HSET", LOCK, "mode", "read", owner, &holds.to_string()]);
    for n in 1..=holds {
        bench.set_up(&["SET", &hold_key(owner, n), "1", "PX", lease]);
    }
    redisson_renews(bench, lease);
}

/// Renews as Redisson does: sets the TTL of the record, even if others read for longer.
fn redisson_renews(bench: &Bench, lease: &str) {
    bench.set_up(&["PEXPIRE", LOCK, lease]);
}

fn reader(n: usize) -> String {
    format!("0a1b2c3d-1111-4222-8333-444455556666:{n}")
}

/// Acquires one hold for each of many readers.
fn many_read(bench: &Bench, readers: std::ops::Range<usize>, lease: &str) {
    for n in readers {
        assert_eq!(bench.read(&reader(n), lease, "1"), ACQUIRED);
    }
}

/// Kills readers as a crash would: their hold keys end, their fields stay.
fn die(bench: &Bench, readers: std::ops::Range<usize>) {
    for n in readers {
        bench.set_up(&["DEL", &hold_key(&reader(n), 1)]);
    }
}

fn readers(bench: &Bench) -> i64 {
    bench.call(&["HLEN", LOCK]).int() - 1
}

#[test]
fn read_release_next_to_many_readers_looks_at_a_few() {
    let bench = Bench::new();
    let mut looks = Vec::new();
    for many in [100, 1000] {
        many_read(&bench, 100..100 + many, "30000");
        let before = (
            bench.server.command_count("pttl"),
            bench.server.command_count("hgetall"),
        );
        for _ in 0..10 {
            assert_eq!(bench.read(A, "30000", "1"), ACQUIRED);
            assert_eq!(bench.unread(A, "0"), Reply::Int(0));
        }
        assert_eq!(
            bench.server.command_count("hgetall"),
            before.1,
            "{many} readers"
        );
        looks.push((bench.server.command_count("pttl") - before.0) / 10);
        assert_eq!(readers(&bench), i64::try_from(many).unwrap());
        assert!(about(bench.left(LOCK), 30_000));
    }
    assert!(
        looks.iter().all(|looks| *looks < 20),
        "{looks:?} reads per release next to 100 and 1000 readers"
    );
}

/// The record ends with the remaining holds of any number of readers, give or take half of the
/// lease that was given up.
#[test]
fn read_release_of_the_longest_of_many_holds_shortens_the_ttl() {
    let bench = Bench::new();
    many_read(&bench, 100..200, "30000");
    for lease in ["40000", "55000"] {
        assert_eq!(bench.read(A, lease, "1"), ACQUIRED);
        assert_eq!(bench.unread(A, "0"), Reply::Int(0));
        assert!(
            about(bench.left(LOCK), lease.parse().unwrap()),
            "others read for half of that: {}",
            bench.left(LOCK)
        );
    }
    assert_eq!(bench.read(A, "3600000", "1"), ACQUIRED);
    assert_eq!(bench.unread(A, "0"), Reply::Int(0));
    assert!(about(bench.left(LOCK), 30_000), "{}", bench.left(LOCK));
    // one of many readers has a long lease, which must survive in any order of the releases
    assert_eq!(bench.read(B, "3600000", "1"), ACQUIRED);
    for n in 100..200 {
        assert_eq!(bench.unread(&reader(n), "0"), Reply::Int(0));
        assert!(bench.left(LOCK) > 3_500_000);
    }
    assert_eq!(bench.unread(B, "0"), Reply::Int(1));
    assert_eq!(bench.snapshot(), []);
}

/// If HRANDFIELD is denied or unknown, the script reads all holds.
#[test]
fn read_release_without_hrandfield_looks_at_all() {
    let bench = Bench::real();
    bench.set_up(&[
        "ACL",
        "SETUSER",
        "limited",
        "on",
        ">pw",
        "~*",
        "&*",
        "+@all",
        "-hrandfield",
    ]);
    let mut limited = bench.server.wire();
    limited.call(&["AUTH", "limited", "pw"]).unwrap();
    many_read(&bench, 100..130, "30000");
    assert_eq!(bench.read(A, "60000", "1"), ACQUIRED);
    let command = eval(
        &source(READ_RELEASE),
        &RELEASES[0],
        &[A, "0", CHANNEL, HOLDS],
    );
    assert_eq!(limited.call(&texts(&command)).unwrap(), Reply::Int(0));
    assert!(about(bench.left(LOCK), 30_000));
    die(&bench, 100..129);
    let command = eval(
        &source(READ_RELEASE),
        &RELEASES[0],
        &[&reader(129), "0", CHANNEL, HOLDS],
    );
    assert_eq!(limited.call(&texts(&command)).unwrap(), Reply::Int(1));
    assert_eq!(bench.snapshot(), []);
}

#[test]
fn the_last_living_reader_wipes_the_dead_however_many() {
    let bench = Bench::new();
    let mut ears = bench.listen(CHANNEL);
    for many in [1, 5, 17, 18, 40, 300] {
        many_read(&bench, 100..100 + many, "30000");
        assert_eq!(bench.read(A, "30000", "1"), ACQUIRED);
        die(&bench, 100..100 + many);
        assert_eq!(bench.unread(A, "0"), Reply::Int(1), "next to {many}");
        assert_eq!(bench.snapshot(), []);
        assert_eq!(ears.heard(&bench), ["1"]);
    }
}

/// During reads, the script deletes dead readers a few at a time, but no living one, including
/// Redisson's.
#[test]
fn read_release_wipes_only_the_dead() {
    let bench = Bench::new();
    let java = "5b8f1c9e-27d4-4a06-8f55-0c1d2e3f4a5b:71";
    for living in [1, 60] {
        bench.clear();
        many_read(&bench, 100..400, "30000");
        die(&bench, 100 + living..400);
        redisson_reads(&bench, java, 3, "30000");
        // released in the wrong order, or not renewed: one of three is enough
        bench.set_up(&["DEL", &hold_key(java, 1), &hold_key(java, 3)]);
        let (mut before, wanted) = (readers(&bench), i64::try_from(living + 1).unwrap());
        for _ in 0..2000 {
            if before == wanted {
                break;
            }
            assert_eq!(bench.read(A, "30000", "1"), ACQUIRED);
            assert_eq!(bench.unread(A, "0"), Reply::Int(0));
            let now = readers(&bench);
            assert!(
                now <= before && before - now <= 100,
                "{before} readers, then {now}"
            );
            before = now;
        }
        assert_eq!(before, wanted);
        for n in 100..100 + living {
            assert_eq!(bench.call(&["HEXISTS", LOCK, &reader(n)]).int(), 1);
        }
        assert_eq!(bench.call(&["HGET", LOCK, java]), Reply::Text("3".into()));
        assert!(about(bench.left(LOCK), 30_000), "{}", bench.left(LOCK));
    }
    // a few are deleted at once; fields that are not readers stay
    bench.clear();
    many_read(&bench, 100..103, "30000");
    bench.set_up(&["HSET", LOCK, &format!("{B}:write"), "1", "text", "x"]);
    die(&bench, 101..103);
    assert_eq!(bench.read(A, "30000", "1"), ACQUIRED);
    assert_eq!(
        bench.twice(|bench| bench.unread(A, "1")),
        Reply::Int(0),
        "nothing is given up"
    );
    assert_eq!(bench.unread(A, "0"), Reply::Int(0));
    bench.assert_fields(&[
        (&*reader(100), "1"),
        (&format!("{B}:write"), "1"),
        ("mode", "read"),
        ("text", "x"),
    ]);
}

/// A reader whose holds have expired either learns that from its next renewal or continues to read,
/// never both.
#[test]
fn a_reader_that_was_wiped_learns_it_from_its_next_renewal() {
    let bench = Bench::new();
    many_read(&bench, 100..102, "30000");
    let dead = reader(101);
    for wiped in [false, true] {
        die(&bench, 101..102);
        if wiped {
            assert_eq!(bench.read(A, "30000", "1"), ACQUIRED);
            assert_eq!(bench.unread(A, "0"), Reply::Int(0));
            assert_eq!(
                bench
                    .untouched(READ_RENEW, &[LOCK], &[&dead, "30000"])
                    .list(),
                [Reply::Int(-1)]
            );
            assert_eq!(
                bench.untouched(READ_RELEASE, &RELEASES[0], &[&dead, "0", CHANNEL, HOLDS]),
                Reply::Nil
            );
            assert_eq!(bench.read_untouched(&dead, "30000", "2"), Reply::Int(-2));
        } else {
            assert_eq!(
                bench.run(READ_RENEW, &[LOCK], &[&dead, "30000"]).list(),
                [Reply::Int(1)]
            );
            assert_eq!(bench.read(A, "30000", "1"), ACQUIRED);
            assert_eq!(bench.unread(A, "0"), Reply::Int(0));
            assert_eq!(readers(&bench), 2);
        }
    }
}

/// Found in a mixed fleet: Redisson's renewal shortens the TTL of the record below a longer lease
/// of ours, and its process dies.
#[test]
fn read_renew_extends_the_record_to_its_owners_longest_hold() {
    let bench = Bench::new();
    let java = "5b8f1c9e-27d4-4a06-8f55-0c1d2e3f4a5b:71";
    assert_eq!(bench.read(A, "90000", "1"), ACQUIRED);
    assert_eq!(bench.read(A, "20000", "2"), ACQUIRED);
    let renew = |lease: &str| {
        assert_eq!(
            bench.run(READ_RENEW, &[LOCK], &[A, lease]).list(),
            [Reply::Int(1)]
        );
    };
    let expires = |n| bench.expires(&hold_key(A, n));
    let before = (expires(1), expires(2));
    for lease in ["80000", "1000"] {
        redisson_reads(&bench, java, 1, "30000");
        assert!(about(bench.left(LOCK), 30_000));
        renew(lease);
        assert!(
            bench.expires(LOCK) >= before.0,
            "the record ends before a hold"
        );
        assert!(about(bench.left(LOCK), 90_000), "nor does it live longer");
        assert_eq!(expires(1), before.0, "a longer hold is left as it is");
        assert!(
            about(bench.left(&hold_key(A, 2)), 80_000),
            "no hold lives beyond the lease"
        );
        assert!(
            about(bench.left(&hold_key(java, 1)), 30_000),
            "nor do others'"
        );
    }
    // calls of others in between do not shorten it either
    redisson_renews(&bench, "30000");
    renew("1000");
    assert_eq!(bench.read(B, "10000", "1"), ACQUIRED);
    assert_eq!(bench.read(B, "10000", "2"), ACQUIRED);
    assert!(bench.expires(LOCK) >= before.0);
    assert_eq!(bench.unread(B, "1"), Reply::Int(0));
    assert_eq!(bench.unread(B, "0"), Reply::Int(0));
    assert!(bench.expires(LOCK) >= before.0);
    // a release lengthens the TTL that Redisson shortened
    redisson_renews(&bench, "30000");
    assert_eq!(bench.read(B, "10000", "1"), ACQUIRED);
    assert_eq!(bench.unread(B, "0"), Reply::Int(0));
    assert!(bench.expires(LOCK) >= before.0, "{}", bench.left(LOCK));
    // Redisson's reader outlives ours: neither its hold nor the record is shortened
    assert_eq!(bench.unread(A, "0"), Reply::Int(0));
    assert!(about(bench.left(LOCK), 30_000) && about(bench.left(&hold_key(java, 1)), 30_000));
    assert!(bench.expires(LOCK) >= bench.expires(&hold_key(java, 1)));
}

/// The server refuses `SET .. PX 0`, so a hold that ends in this millisecond passes no TTL on.
#[test]
fn read_release_of_a_hold_that_ends_now_is_not_refused() {
    let bench = Bench::new();
    assert_eq!(bench.read(A, "60000", "1"), ACQUIRED);
    for round in 0..400 {
        bench.set_up(&["HSET", LOCK, A, "2"]);
        bench.set_up(&["DEL", &hold_key(A, 1)]);
        bench.set_up(&["SET", &hold_key(A, 2), "1", "PX", "2"]);
        // each round leaves a little less of the 2 ms
        let start = std::time::Instant::now();
        while start.elapsed() < std::time::Duration::from_micros(1500 + 5 * (round % 200)) {
            std::hint::spin_loop();
        }
        assert_eq!(bench.unread(A, "1"), Reply::Int(0), "round {round}");
    }
}

/// A user without PUBLISH cannot release, and the attempt leaves nothing behind.
#[test]
fn a_last_release_without_publish_is_refused_and_does_nothing() {
    let bench = Bench::real();
    bench.set_up(&[
        "ACL", "SETUSER", "limited", "on", ">pw", "~*", "&*", "+@all", "-publish",
    ]);
    let mut limited = bench.server.wire();
    limited.call(&["AUTH", "limited", "pw"]).unwrap();
    let sides: [Side; 3] = [
        |bench| bench.read(A, "30000", "1"),
        |bench| bench.write(A, "30000", "1", TRIES),
        |bench| {
            assert_eq!(bench.write(A, "30000", "1", TRIES), ACQUIRED);
            bench.read(A, "30000", "1")
        },
    ];
    for (side, script) in sides
        .into_iter()
        .zip([READ_RELEASE, WRITE_RELEASE, WRITE_RELEASE])
    {
        bench.clear();
        assert_eq!(side(&bench), ACQUIRED);
        let before = bench.snapshot();
        let keys = RELEASES[usize::from(script == WRITE_RELEASE)];
        let command = eval(&source(script), &keys, &[A, "0", CHANNEL, HOLDS]);
        assert!(
            limited.call(&texts(&command)).unwrap().is_error(),
            "{script}"
        );
        assert_eq!(bench.snapshot(), before, "{script}");
    }
}

/// A script that is refused at any command has written nothing that counts.
#[test]
fn a_script_that_is_refused_has_written_nothing_that_counts() {
    let bench = Bench::real();
    let sides: [(&str, Side); 5] = [
        ("nobody", |_| ACQUIRED),
        ("one reads once", |bench| bench.read(A, "30000", "1")),
        ("one reads twice", |bench| {
            assert_eq!(bench.read(A, "10000", "1"), ACQUIRED);
            bench.read(A, "20000", "2")
        }),
        ("two read, one is dead", |bench| {
            many_read(bench, 100..102, "20000");
            die(bench, 101..102);
            bench.read(A, "20000", "1")
        }),
        ("one writes and reads", |bench| {
            assert_eq!(bench.write(A, "20000", "1", TRIES), ACQUIRED);
            bench.read(A, "10000", "1")
        }),
    ];
    let content = || -> Vec<_> {
        bench
            .snapshot()
            .into_iter()
            .map(|(key, value, _)| (key, value))
            .collect()
    };
    let mut steps = every_script();
    for (script, rest) in [
        (READ, vec![keys_of(A), WAITS.into()]),
        (WRITE, vec![WAITS.into()]),
    ] {
        steps.push((
            script,
            KEYS.to_vec(),
            [vec![A.into(), "40000".into(), "2".into()], rest].concat(),
        ));
    }
    let commands = [
        "set", "hset", "hdel", "del", "pexpire", "publish", "hget", "hgetall", "hlen", "pttl",
        "exists", "get",
    ];
    let mut refusals = 0;
    for command in commands {
        bench.set_up(&[
            "ACL",
            "SETUSER",
            "limited",
            "reset",
            "on",
            ">pw",
            "~*",
            "&*",
            "+@all",
            &format!("-{command}"),
        ]);
        let mut limited = bench.server.wire();
        limited.call(&["AUTH", "limited", "pw"]).unwrap();
        for (state, set_up) in &sides {
            for (script, keys, args) in &steps {
                bench.clear();
                assert_eq!(set_up(&bench), ACQUIRED);
                let before = content();
                let reply = limited
                    .call(&texts(&eval(&source(script), keys, &texts(args))))
                    .unwrap();
                let refused = reply.is_error()
                    || matches!(&reply, Reply::List(answers) if answers[0] == Reply::Int(-2));
                if refused {
                    refusals += 1;
                    assert_eq!(
                        content(),
                        before,
                        "{script} {args:?} without {command}, where {state}"
                    );
                }
                bench.assert_every_key_expires();
            }
        }
    }
    println!("{refusals} refusals");
    assert!(refusals > 100);
}

/// A re-entry does not give a TTL to a record that lost its own.
#[test]
fn re_entry_gives_a_record_without_a_ttl_none() {
    let bench = Bench::new();
    let sides: [Side; 2] = [
        |bench| bench.read(A, "30000", "1"),
        |bench| bench.write(A, "30000", "1", TRIES),
    ];
    let hold = keys_of(A);
    for (side, script, rest) in [
        (sides[0], READ, vec![&*hold, TRIES]),
        (sides[1], WRITE, vec![TRIES]),
    ] {
        bench.clear();
        assert_eq!(side(&bench), ACQUIRED);
        bench.set_up(&["PERSIST", LOCK]);
        assert_eq!(
            bench.run(script, &KEYS, &[&[A, "10000", "2"], &rest[..]].concat()),
            ACQUIRED
        );
        assert_eq!(bench.left(LOCK), -1, "{script}");
    }
}

/// The `mode` field is not a reader.
#[test]
fn an_owner_named_like_the_mode_holds_nothing() {
    let bench = Bench::new();
    assert_eq!(bench.read(A, "30000", "1"), ACQUIRED);
    for holds in ["0", "1"] {
        assert_eq!(
            bench.untouched(READ_RELEASE, &RELEASES[0], &["mode", holds, CHANNEL, HOLDS]),
            Reply::Nil
        );
    }
    assert_eq!(
        bench
            .untouched(READ_RENEW, &[LOCK], &["mode", "60000"])
            .list(),
        [Reply::Int(-1)]
    );
}

// --- taking turns ---

fn first() -> Reply {
    Reply::Text("0".into())
}

fn after() -> Reply {
    Reply::Text("1".into())
}

/// Asserts "busy" with a hint of at most half a patience.
#[track_caller]
fn looks_soon(reply: &Reply) {
    let left = busy_ttl(reply);
    assert!((1..=1_000).contains(&left), "{left}");
}

#[test]
fn a_reader_that_waits_for_a_writer_comes_before_the_next() {
    let bench = Bench::new();
    assert_eq!(bench.write(A, "30000", "1", TRIES), ACQUIRED);
    assert!(
        about(busy_ttl(&bench.read_untouched(B, "60000", "1")), 30_000),
        "a try is not recorded"
    );
    for _sent_twice in 0..2 {
        assert!(about(busy_ttl(&bench.read_waits(B, "60000")), 30_000));
        assert_eq!(bench.turn(B), first());
    }
    assert!(about(bench.left(READERS), 32_000));
    assert!(about(busy_ttl(&bench.read_waits(C, "60000")), 30_000));
    assert_eq!(bench.unwrite(A, "0"), Reply::Int(1));
    // a writer that tries, one that waits, and a reader that comes in between
    let left = busy_ttl(&bench.write(A, "30000", "1", TRIES));
    assert!(
        (1..=2_000).contains(&left) && (1..=2_000).contains(&bench.turn_left()),
        "{left}"
    );
    looks_soon(&bench.write(A, "30000", "1", WAITS));
    assert_eq!(bench.call(&["GET", INTENT]), Reply::Text(A.into()));
    looks_soon(&bench.read_waits(D, "60000"));
    // both acquire despite the intent
    assert_eq!(bench.twice(|bench| bench.read_waits(B, "60000")), ACQUIRED);
    looks_soon(&bench.write(A, "30000", "1", WAITS));
    assert_eq!(bench.read(C, "60000", "1"), ACQUIRED);
    assert_eq!(
        (bench.turn(B), bench.turn(C), bench.turn(D)),
        (Reply::Nil, Reply::Nil, after())
    );
}

/// A reader that was held back by an intent comes before the writer after that one.
#[test]
fn a_reader_held_back_by_an_intent_precedes_the_writer_after() {
    let bench = Bench::new();
    assert_eq!(bench.read(C, "30000", "1"), ACQUIRED);
    looks_soon(&bench.write(A, "30000", "1", WAITS));
    looks_soon(&bench.read_untouched(B, "60000", "1"));
    looks_soon(&bench.read_waits(B, "60000"));
    assert_eq!(bench.turn(B), after());
    let left = bench.left(READERS);
    assert!((2_001..=4_000).contains(&left), "{left}");
    assert_eq!(bench.unread(C, "0"), Reply::Int(1));
    // it is the writer's turn
    looks_soon(&bench.read_waits(B, "60000"));
    assert_eq!(
        bench.twice(|bench| bench.write(A, "30000", "1", WAITS)),
        ACQUIRED
    );
    assert_eq!(bench.turn(B), first());
    assert!(about(bench.left(READERS), 32_000));
    assert_eq!(bench.unwrite(A, "0"), Reply::Int(1));
    looks_soon(&bench.write(A, "30000", "1", WAITS));
    assert_eq!(bench.read_waits(B, "60000"), ACQUIRED);
    assert_eq!(bench.left(READERS), -2, "no trace");
}

impl Bench {
    /// Returns the remaining time of the readers' turn, in milliseconds, which a writer has set.
    fn turn_left(&self) -> i64 {
        self.turn("until").text().parse::<i64>().unwrap() - self.now()
    }

    fn turn_ends_in(&self, millis: i64) {
        self.set_up(&["ZADD", READERS, &(self.now() + millis).to_string(), "until"]);
    }
}

/// Readers that died while they waited cost writers one patience in all, also if more readers come
/// later, and cost the living ones nothing.
#[test]
fn dead_readers_hold_a_writer_back_for_one_patience() {
    let bench = Bench::new();
    assert_eq!(bench.write(A, "30000", "1", TRIES), ACQUIRED);
    for dead in [B, C] {
        bench.read_waits(dead, "60000");
    }
    assert_eq!(bench.unwrite(A, "0"), Reply::Int(1));
    looks_soon(&bench.write(A, "30000", "1", WAITS));
    bench.turn_ends_in(700);
    looks_soon(&bench.read_waits(D, "60000"));
    let left = busy_ttl(&bench.write(A, "30000", "1", WAITS));
    assert!((1..=700).contains(&left), "{left}");
    bench.turn_ends_in(0);
    assert_eq!(
        bench.twice(|bench| bench.write(A, "30000", "1", WAITS)),
        ACQUIRED
    );
    let turns = [B, C, D, "until"].map(|of| bench.turn(of));
    assert_eq!(
        turns,
        [Reply::Nil, Reply::Nil, first(), Reply::Nil],
        "it is the turn of the one that lives"
    );
    assert_eq!(bench.unwrite(A, "0"), Reply::Int(1));
    looks_soon(&bench.write(A, "30000", "1", WAITS));
    assert_eq!(bench.read_waits(D, "60000"), ACQUIRED);
    assert_eq!(bench.left(READERS), -2, "no trace");
}

/// The readers' turn begins once, also while others read; a writer that only tries starts the turn
/// as well.
#[test]
fn the_turn_of_readers_begins_with_the_first_writer_that_waits() {
    for waits in [WAITS, TRIES] {
        let bench = Bench::new();
        assert_eq!(bench.write(A, "30000", "1", TRIES), ACQUIRED);
        bench.read_waits(B, "60000");
        bench.read_waits(C, "60000");
        assert_eq!(bench.unwrite(A, "0"), Reply::Int(1));
        assert_eq!(bench.read_waits(B, "60000"), ACQUIRED);
        assert_eq!(bench.turn("until"), Reply::Nil);
        bench.write(A, "30000", "1", waits);
        assert!((1..=2_000).contains(&bench.turn_left()));
        bench.turn_ends_in(-1);
        bench.write(A, "30000", "1", waits);
        assert!(bench.turn_left() < 0, "it begins once");
        assert_eq!(bench.unread(B, "0"), Reply::Int(1));
        assert_eq!(bench.write(A, "30000", "1", waits), ACQUIRED);
        assert_eq!(bench.left(READERS), -2, "no trace");
    }
}

/// After the clock went back, a mark could live longer than any patience.
#[test]
fn a_mark_holds_no_owner_back_for_longer_than_a_patience() {
    let bench = Bench::new();
    for back in [60_000_i64, 30 * 86_400_000] {
        bench.set_up(&["SET", INTENT, A, "PX", &back.to_string()]);
        looks_soon(&bench.read(B, "60000", "1"));
        assert!(bench.left(INTENT) <= 2_000);
        bench.clear();
        bench.set_up(&["ZADD", READERS, "0", B, "0", "until"]);
        bench.set_up(&["PEXPIRE", READERS, &back.to_string()]);
        bench.turn_ends_in(back);
        assert_eq!(busy_ttl(&bench.write(A, "60000", "1", TRIES)), 2_000);
        assert!((1..=2_000).contains(&bench.turn_left()));
        bench.clear();
    }
    // a mark that was made permanent is ignored
    bench.set_up(&["SET", INTENT, A]);
    assert_eq!(bench.read(C, "60000", "1"), ACQUIRED);
}

/// An owner that waits both to read and to write does not wait for itself, and gets its readers'
/// turn after its own write.
#[test]
fn a_writer_is_not_held_back_by_its_own_mark() {
    let bench = Bench::new();
    assert_eq!(bench.write(A, "30000", "1", TRIES), ACQUIRED);
    bench.read_waits(B, "60000");
    assert_eq!(bench.unwrite(A, "0"), Reply::Int(1));
    for own in ["0", "1"] {
        bench.set_up(&["ZADD", READERS, own, B]);
        assert_eq!(
            bench.twice(|bench| bench.write(B, "30000", "1", TRIES)),
            ACQUIRED
        );
        assert_eq!(bench.turn(B), first());
        assert_eq!(bench.unwrite(B, "0"), Reply::Int(1));
        looks_soon(&bench.write(A, "30000", "1", WAITS));
    }
    assert_eq!(bench.read_waits(B, "60000"), ACQUIRED);
    assert_eq!(bench.left(READERS), -2, "no trace");
}

#[test]
fn read_release_by_a_waiting_reader_takes_its_own_mark_back() {
    let bench = Bench::new();
    let mut ears = bench.listen(CHANNEL);
    assert_eq!(bench.write(A, "30000", "1", TRIES), ACQUIRED);
    for reader in [B, C] {
        bench.read_waits(reader, "60000");
    }
    assert_eq!(
        bench.untouched(READ_RELEASE, &RELEASES[0], &[D, "0", CHANNEL, HOLDS]),
        Reply::Nil
    );
    assert_eq!(
        bench.untouched(READ_RELEASE, &RELEASES[0], &[B, "1", CHANNEL, HOLDS]),
        Reply::Nil,
        "it still waits"
    );
    assert_eq!(bench.twice(|bench| bench.unread(B, "0")), Reply::Nil);
    assert_eq!((bench.turn(B), bench.turn(C)), (Reply::Nil, first()));
    assert_eq!(ears.heard(&bench), [] as [&str; 0], "the writer is there");
    assert_eq!(bench.unwrite(A, "0"), Reply::Int(1));
    assert_eq!(bench.unread(C, "0"), Reply::Nil);
    assert_eq!(ears.heard(&bench), ["1", "1"], "a writer may wait for it");
    assert_eq!(bench.write(A, "30000", "1", TRIES), ACQUIRED);
}

// --- writing ---

#[test]
fn write_acquire_of_a_free_lock_returns_1_and_ends_the_intent() {
    let bench = Bench::new();
    bench.set_up(&["SET", INTENT, B, "PX", PATIENCE]);
    assert_eq!(
        bench.twice(|bench| bench.write(A, "30000", "1", WAITS)),
        ACQUIRED
    );
    bench.assert_fields(&[(&format!("{A}:write"), "1"), ("mode", "write")]);
    assert!(about(bench.left(LOCK), 30_000));
    assert_eq!(bench.snapshot().len(), 1, "nothing but the record");
}

/// A write acquire on re-entry takes no hold away, and never shortens the lease.
#[test]
fn write_acquire_on_re_entry_drops_no_hold_and_never_shortens() {
    let bench = Bench::new();
    assert_eq!(bench.write(A, "60000", "1", TRIES), ACQUIRED);
    let expires = bench.expires(LOCK);
    for holds in ["2", "3"] {
        assert_eq!(
            bench.twice(|bench| bench.write(A, "1000", holds, TRIES)),
            ACQUIRED
        );
        bench.assert_fields(&[(&format!("{A}:write"), holds), ("mode", "write")]);
        assert_eq!(bench.expires(LOCK), expires);
    }
    assert_eq!(bench.write(A, "90000", "2", TRIES), ACQUIRED);
    bench.assert_fields(&[(&format!("{A}:write"), "3"), ("mode", "write")]);
    assert!(about(bench.left(LOCK), 90_000));
}

/// An acquire overwrites a damaged hold count instead of failing.
#[test]
fn acquires_overwrite_what_is_no_count() {
    let bench = Bench::new();
    for damaged in ["nan", "inf", "1e18", "100000", "-1", " 3"] {
        assert_eq!(bench.read(A, "30000", "1"), ACQUIRED);
        bench.set_up(&["HSET", LOCK, A, damaged]);
        assert_eq!(bench.read(A, "30000", "2"), ACQUIRED);
        bench.assert_fields(&[(A, "2"), ("mode", "read")]);
        bench.set_up(&["FLUSHALL"]);
        assert_eq!(bench.write(A, "30000", "1", TRIES), ACQUIRED);
        let large = if damaged == "100000" {
            "9999999999"
        } else {
            damaged
        };
        bench.set_up(&["HSET", LOCK, &format!("{A}:write"), large]);
        assert_eq!(bench.write(A, "30000", "2", TRIES), ACQUIRED);
        bench.assert_fields(&[(&format!("{A}:write"), "2"), ("mode", "write")]);
        bench.set_up(&["FLUSHALL"]);
    }
}

/// A write acquire while another owner writes replies the TTL of that, and leaves no intent.
#[test]
fn write_acquire_during_a_write_gets_its_ttl_and_sets_no_intent() {
    let bench = Bench::new();
    assert_eq!(bench.write(A, "30000", "1", TRIES), ACQUIRED);
    for waits in [TRIES, WAITS] {
        assert!(about(
            busy_ttl(&bench.write_untouched(B, "60000", "1", waits)),
            30_000
        ));
    }
    bench.set_up(&["PERSIST", LOCK]);
    assert_eq!(bench.write_untouched(B, "60000", "1", WAITS), busy(-1));
    assert_eq!(bench.read_untouched(B, "60000", "1"), busy(-1));
}

#[test]
fn write_acquire_during_reads_leaves_an_intent_if_it_waits() {
    let bench = Bench::new();
    assert_eq!(bench.read(A, "30000", "1"), ACQUIRED);
    assert!(
        about(
            busy_ttl(&bench.write_untouched(B, "60000", "1", TRIES)),
            30_000
        ),
        "it does not wait"
    );
    for owner in [B, A] {
        assert_eq!(
            busy_ttl(&bench.write(owner, "60000", "1", WAITS)),
            1_000,
            "half the time of the intent"
        );
        assert_eq!(bench.call(&["GET", INTENT]), Reply::Text(owner.into()));
        let left = bench.left(INTENT);
        assert!((1..=2_000).contains(&left), "{left}");
    }
    bench.assert_fields(&[(A, "1"), ("mode", "read")]);
    // the hint is shorter if the readers end sooner
    bench.set_up(&["PEXPIRE", LOCK, "300"]);
    let hint = busy_ttl(&bench.write(B, "60000", "1", WAITS));
    assert!((1..=300).contains(&hint), "{hint}");
    bench.set_up(&["PERSIST", LOCK]);
    assert_eq!(bench.write(B, "60000", "1", WAITS), busy(-1));
}

#[test]
fn write_release_of_the_last_hold_returns_1_and_says_so_once() {
    let bench = Bench::new();
    let mut ears = bench.listen(CHANNEL);
    for holds in ["1", "3"] {
        assert_eq!(bench.write(A, "30000", "1", TRIES), ACQUIRED);
        assert_eq!(bench.write(A, "30000", holds, TRIES), ACQUIRED);
        assert_eq!(bench.unwrite(A, "0"), Reply::Int(1));
        assert_eq!(bench.snapshot(), []);
        assert_eq!(bench.unwrite(A, "0"), Reply::Nil, "sent twice");
        assert_eq!(ears.heard(&bench), ["1"]);
    }
}

#[test]
fn write_release_of_some_holds_returns_0_and_leaves_the_ttl() {
    let bench = Bench::new();
    let mut ears = bench.listen(CHANNEL);
    for holds in ["1", "2", "3"] {
        assert_eq!(bench.write(A, "30000", holds, TRIES), ACQUIRED);
    }
    let expires = bench.expires(LOCK);
    for holds in ["2", "1", "9"] {
        assert_eq!(bench.twice(|bench| bench.unwrite(A, holds)), Reply::Int(0));
        let left = if holds == "9" { "1" } else { holds };
        bench.assert_fields(&[(&format!("{A}:write"), left), ("mode", "write")]);
        assert_eq!(bench.expires(LOCK), expires);
    }
    assert_eq!(ears.heard(&bench), [] as [&str; 0]);
}

/// R71, R72: a writer that also reads keeps reading for the longest lease of its reads.
#[test]
fn r71_r72_write_release_with_reads_inside_is_a_downgrade() {
    let bench = Bench::new();
    let mut ears = bench.listen(CHANNEL);
    for (write, first, second) in [("90000", "60000", "30000"), ("20000", "30000", "60000")] {
        assert_eq!(bench.write(A, write, "1", TRIES), ACQUIRED);
        assert_eq!(bench.read(A, first, "1"), ACQUIRED);
        assert_eq!(bench.read(A, second, "2"), ACQUIRED);
        assert_eq!(bench.unwrite(A, "0"), Reply::Int(1));
        bench.assert_fields(&[(A, "2"), ("mode", "read")]);
        assert!(about(bench.left(LOCK), 60_000), "{}", bench.left(LOCK));
        assert_eq!(
            bench.untouched(WRITE_RELEASE, &RELEASES[1], &[A, "0", CHANNEL, HOLDS]),
            Reply::Nil,
            "sent twice"
        );
        assert_eq!(ears.heard(&bench), ["1"], "readers may come in");
        bench.clear();
    }
    // the reads have expired
    assert_eq!(bench.write(A, "90000", "1", TRIES), ACQUIRED);
    assert_eq!(bench.read(A, "60000", "1"), ACQUIRED);
    bench.set_up(&["DEL", &hold_key(A, 1)]);
    assert_eq!(bench.unwrite(A, "0"), Reply::Int(1));
    assert_eq!(bench.snapshot(), []);
    assert_eq!(ears.heard(&bench), ["1"]);
}

/// A release of the record alone handles only the cases that need no other key.
#[test]
fn a_record_released_alone_says_nothing_of_other_keys() {
    let bench = Bench::new();
    let mut ears = bench.listen(CHANNEL);
    let alone = |side, owner, holds| {
        bench.run(
            &format!("read_write/{side}_release_record"),
            &[LOCK],
            &[owner, holds, CHANNEL],
        )
    };
    assert_eq!(bench.write(A, "30000", "1", TRIES), ACQUIRED);
    assert_eq!(bench.write(A, "30000", "2", TRIES), ACQUIRED);
    assert_eq!(alone("write", B, "0"), Reply::Nil);
    assert_eq!(alone("read", A, "0"), Reply::Nil);
    assert_eq!(alone("write", A, "1"), Reply::Int(0));
    bench.assert_fields(&[(&format!("{A}:write"), "1"), ("mode", "write")]);
    assert_eq!(bench.read(A, "60000", "1"), ACQUIRED);
    assert_eq!(alone("write", A, "0"), Reply::Nil, "it still reads");
    assert_eq!(alone("read", A, "0"), Reply::Int(0), "it still writes");
    assert_eq!(ears.heard(&bench), [] as [&str; 0]);
    assert_eq!(alone("write", A, "0"), Reply::Int(1));
    assert_eq!(alone("write", A, "0"), Reply::Nil, "sent twice");
    assert_eq!(ears.heard(&bench), ["1"]);
    bench.clear();

    assert_eq!(bench.read(A, "30000", "1"), ACQUIRED);
    assert_eq!(bench.read(A, "30000", "2"), ACQUIRED);
    assert_eq!(bench.read(B, "60000", "1"), ACQUIRED);
    let expires = bench.expires(LOCK);
    assert_eq!(
        alone("read", A, "1"),
        Reply::Nil,
        "its hold keys say for how long"
    );
    assert_eq!(alone("read", A, "0"), Reply::Int(0));
    bench.assert_fields(&[(B, "1"), ("mode", "read")]);
    assert_eq!(bench.expires(LOCK), expires);
    assert_eq!(ears.heard(&bench), [] as [&str; 0]);
    assert_eq!(alone("read", B, "0"), Reply::Int(1));
    assert_eq!(alone("read", B, "0"), Reply::Nil, "sent twice");
    assert_eq!(ears.heard(&bench), ["1"]);
}

#[test]
fn write_release_by_a_waiting_writer_takes_its_own_intent_back() {
    let bench = Bench::new();
    let mut ears = bench.listen(CHANNEL);
    assert_eq!(bench.read(A, "30000", "1"), ACQUIRED);
    assert!(busy_ttl(&bench.write(B, "30000", "1", WAITS)) > 0);
    assert_eq!(
        bench.untouched(WRITE_RELEASE, &RELEASES[1], &[A, "0", CHANNEL, HOLDS]),
        Reply::Nil,
        "anothers intent"
    );
    assert_eq!(
        bench.untouched(WRITE_RELEASE, &RELEASES[1], &[B, "1", CHANNEL, HOLDS]),
        Reply::Nil,
        "it still waits"
    );
    assert_eq!(ears.heard(&bench), [] as [&str; 0]);
    assert_eq!(bench.unwrite(B, "0"), Reply::Nil);
    assert_eq!(bench.left(INTENT), -2);
    bench.assert_fields(&[(A, "1"), ("mode", "read")]);
    assert_eq!(
        ears.heard(&bench),
        ["1"],
        "readers that were held back may come in"
    );
    assert_eq!(bench.unwrite(B, "0"), Reply::Nil, "sent twice");
    assert_eq!(ears.heard(&bench), [] as [&str; 0]);
}

// --- renewing ---

#[test]
fn renew_replies_for_each_lock() {
    let bench = Bench::new();
    bench.set_up(&["SET", "data", "x"]);
    bench.set_up(&["HSET", "plain", A, "1"]);
    for (lock, owner) in [("mine", A), ("others", B)] {
        for (name, script) in [("r", READ), ("w", WRITE)] {
            let lock = format!("{name}:{lock}");
            let keys = format!("{{{lock}}}:{owner}:rwlock_timeout:");
            let rest = if name == "r" {
                vec![keys.as_str(), TRIES]
            } else {
                vec![TRIES]
            };
            let args = [&[owner, "10000", "1"], &rest[..]].concat();
            assert_eq!(
                bench.run(script, &[&lock, INTENT, READERS], &args),
                ACQUIRED
            );
        }
    }
    let wanted = [1, -1, 0, -1, -1].map(Reply::Int);
    for (name, script) in [("r", READ_RENEW), ("w", WRITE_RENEW)] {
        let (mine, others) = (format!("{name}:mine"), format!("{name}:others"));
        let keys = [&*mine, &others, "gone", "data", "plain"];
        for _ in 0..2 {
            assert_eq!(
                bench.run(script, &keys, &leases(&[A; 5], "30000")).list(),
                wanted
            );
        }
        assert!(about(bench.left(&mine), 30_000) && about(bench.left(&others), 10_000));
        assert_eq!(
            bench.run(script, &[&mine], &[A, "1000"]).list(),
            [Reply::Int(1)]
        );
        assert!(about(bench.left(&mine), 30_000), "a longer TTL is left");
        // a reader is not a writer, and vice versa
        let other = if name == "r" { WRITE_RENEW } else { READ_RENEW };
        assert_eq!(
            bench.untouched(other, &[&mine], &[A, "60000"]).list(),
            [Reply::Int(-1)]
        );
        bench.refused(script, &[&mine], &[A]);
        bench.refused(script, &[&mine], &[A, "30000", A]);
    }
    assert!(about(
        bench.left(&format!("{{r:mine}}:{A}:rwlock_timeout:1")),
        30_000
    ));
    assert!(
        about(
            bench.left(&format!("{{r:others}}:{B}:rwlock_timeout:1")),
            10_000
        ),
        "R04: its own holds only"
    );
}

/// R07: renews each existing hold, and revives the first if none exists.
#[test]
fn r07_read_renew_lengthens_each_hold_and_revives_the_first() {
    let bench = Bench::new();
    for (holds, lease) in [("1", "10000"), ("2", "60000"), ("3", "20000")] {
        assert_eq!(bench.read(A, lease, holds), ACQUIRED);
    }
    assert_eq!(
        bench.run(READ_RENEW, &[LOCK], &[A, "30000"]).list(),
        [Reply::Int(1)]
    );
    for (n, left) in [(1, 30_000), (2, 60_000), (3, 30_000)] {
        assert!(about(bench.left(&hold_key(A, n)), left), "hold {n}");
    }
    bench.set_up(&["DEL", &hold_key(A, 1), &hold_key(A, 2), &hold_key(A, 3)]);
    for _ in 0..2 {
        assert_eq!(
            bench.run(READ_RENEW, &[LOCK], &[A, "90000"]).list(),
            [Reply::Int(1)]
        );
        assert!(about(bench.left(&hold_key(A, 1)), 90_000) && about(bench.left(LOCK), 90_000));
    }
    assert_eq!(bench.snapshot().len(), 2);
    // a record without a TTL stays without one
    bench.set_up(&["PERSIST", LOCK]);
    assert_eq!(
        bench.run(READ_RENEW, &[LOCK], &[A, "90000"]).list(),
        [Reply::Int(1)]
    );
    assert_eq!(bench.left(LOCK), -1);
}

#[test]
fn renew_of_a_single_lock_returns_the_servers_refusal() {
    let bench = Bench::real();
    assert_eq!(bench.read(A, "10000", "1"), ACQUIRED);
    assert_eq!(
        bench.run(WRITE, &["w", INTENT, READERS], &[A, "10000", "1", TRIES]),
        ACQUIRED
    );
    bench.set_up(&[
        "ACL", "SETUSER", "limited", "on", ">pw", "~*", "&*", "+@all", "-pexpire",
    ]);
    let mut limited = bench.server.wire();
    limited.call(&["AUTH", "limited", "pw"]).unwrap();
    let before = bench.snapshot();
    for (script, lock) in [(READ_RENEW, LOCK), (WRITE_RENEW, "w")] {
        let mut run = |keys: &[&str], args: &[&str]| {
            let command = eval(&source(script), keys, args);
            limited.call(&texts(&command)).unwrap()
        };
        assert!(run(&[lock], &[A, "30000"]).is_error(), "{script}");
        let both = run(&[lock, "gone"], &leases(&[A; 2], "30000"));
        assert_eq!(both.list(), [Reply::Int(-2), Reply::Int(0)], "{script}");
    }
    assert_eq!(bench.snapshot(), before);
}

// --- force_release and inspect ---

#[test]
fn force_release_ends_the_own_side_only() {
    let bench = Bench::new();
    let mut ears = bench.listen(CHANNEL);
    let (reading, writing) = ([CHANNEL, HOLDS, "read"], [CHANNEL, HOLDS, "write"]);
    assert_eq!(bench.untouched(FORCE, &[LOCK], &reading), Reply::Int(0));
    assert_eq!(bench.untouched(FORCE, &[LOCK], &writing), Reply::Int(0));
    assert_eq!(bench.read(A, "30000", "1"), ACQUIRED);
    assert_eq!(bench.read(A, "30000", "2"), ACQUIRED);
    assert_eq!(bench.read(B, "30000", "1"), ACQUIRED);
    assert_eq!(bench.untouched(FORCE, &[LOCK], &writing), Reply::Int(0));
    assert_eq!(ears.heard(&bench), [] as [&str; 0]);
    assert_eq!(bench.run(FORCE, &[LOCK], &reading), Reply::Int(1));
    assert_eq!(bench.snapshot(), [], "holds as well");
    assert_eq!(ears.heard(&bench), ["1"]);
    assert_eq!(
        bench.untouched(FORCE, &[LOCK], &reading),
        Reply::Int(0),
        "sent twice"
    );
    assert_eq!(bench.write(A, "30000", "1", TRIES), ACQUIRED);
    assert_eq!(bench.read(A, "30000", "1"), ACQUIRED);
    assert_eq!(bench.untouched(FORCE, &[LOCK], &reading), Reply::Int(0));
    assert_eq!(ears.heard(&bench), [] as [&str; 0]);
    assert_eq!(bench.run(FORCE, &[LOCK], &writing), Reply::Int(1));
    assert_eq!(bench.snapshot(), []);
    assert_eq!(ears.heard(&bench), ["1"]);
    assert_eq!(
        bench.untouched(FORCE, &[LOCK], &writing),
        Reply::Int(0),
        "sent twice"
    );
}

/// R67: each side reports only its own holders.
#[test]
fn r67_inspect_returns_the_readers_or_the_writer() {
    let bench = Bench::new();
    let inspect = |script: &str| bench.untouched(script, &[LOCK], &[]);
    assert_eq!(
        (inspect(READ_INSPECT), inspect(WRITE_INSPECT)),
        (Reply::Nil, Reply::Nil)
    );
    assert_eq!(bench.write(A, "30000", "1", TRIES), ACQUIRED);
    assert_eq!(bench.write(A, "30000", "2", TRIES), ACQUIRED);
    assert_eq!(inspect(READ_INSPECT), Reply::Nil);
    let answer = inspect(WRITE_INSPECT);
    assert!(about(answer.list()[0].int(), 30_000));
    assert_eq!(answer.list()[1..], [Reply::Text(A.into()), Reply::Int(2)]);
    assert_eq!(bench.read(A, "30000", "1"), ACQUIRED);
    assert_eq!(
        inspect(READ_INSPECT).list()[1..],
        [Reply::Text(A.into()), Reply::Int(1)]
    );
    assert_eq!(bench.unwrite(A, "0"), Reply::Int(1));
    assert_eq!(inspect(WRITE_INSPECT), Reply::Nil);
    assert_eq!(bench.read(B, "30000", "1"), ACQUIRED);
    let readers = inspect(READ_INSPECT);
    assert_eq!(readers.list().len(), 5);
    for reader in [A, B] {
        assert!(readers.list().contains(&Reply::Text(reader.into())));
    }
    bench.set_up(&["PERSIST", LOCK]);
    assert_eq!(inspect(READ_INSPECT).list()[0], Reply::Int(-1));
}

// --- refusals ---

/// R52, F30: the scripts leave a plain lock's record alone, even of the same owner, and other data.
#[test]
fn r52_f30_scripts_leave_other_hashes_alone() {
    let bench = Bench::new();
    let mut ears = bench.listen(CHANNEL);
    let (own, two) = ([A, "1"], [A, "1", B, "1"]);
    let hashes: [&[&str]; 4] = [
        &own,
        &two,
        &["name", "Ada", "born", "1815"],
        &["mode", "dark", "tongue", "en"],
    ];
    for fields in hashes {
        for ttl in [None, Some("60000")] {
            bench.clear();
            bench.set_up(
                &["HSET", LOCK]
                    .iter()
                    .chain(fields)
                    .copied()
                    .collect::<Vec<_>>(),
            );
            if let Some(ttl) = ttl {
                bench.set_up(&["PEXPIRE", LOCK, ttl]);
            }
            for (script, keys, args) in every_script() {
                let reply = bench.untouched(script, &keys, &texts(&args));
                let wanted = match script {
                    READ_RELEASE | WRITE_RELEASE => Reply::Nil,
                    READ_RENEW | WRITE_RENEW => Reply::List(vec![Reply::Int(-1)]),
                    _ => Reply::Int(-3),
                };
                assert_eq!(reply, wanted, "{script} on {fields:?}");
            }
        }
    }
    assert_eq!(ears.heard(&bench), [] as [&str; 0]);
}

/// R52: a plain lock's scripts leave this record alone, even with fields of the same owner in it.
#[test]
fn r52_plain_scripts_leave_a_read_write_record_alone() {
    let bench = Bench::new();
    let (queue, timeouts) = (
        "redisson_lock_queue:{orders:7}",
        "redisson_lock_timeout:{orders:7}",
    );
    let (token, seen) = (
        "redisson_lock_token:{orders:7}",
        "nestlock_fair_seen:{orders:7}",
    );
    let sides: [Side; 2] = [
        |bench| bench.read(A, "30000", "1"),
        |bench| {
            assert_eq!(bench.write(A, "30000", "1", TRIES), ACQUIRED);
            bench.read(A, "30000", "1")
        },
    ];
    for side in sides {
        bench.clear();
        assert_eq!(side(&bench), ACQUIRED);
        for holds in ["1", "2"] {
            let wrong = Reply::Int(-3);
            assert_eq!(
                bench.untouched("reentrant/acquire", &[LOCK], &[A, "60000", holds]),
                wrong
            );
            assert_eq!(
                bench.untouched("fenced/acquire", &[LOCK, token], &[A, "60000", holds]),
                wrong
            );
            let args = [A, "60000", holds, "5000", "1", "c"];
            assert_eq!(
                bench.untouched("fair/acquire", &[LOCK, queue, timeouts, seen], &args),
                wrong
            );
        }
        for holds in ["0", "1"] {
            assert_eq!(
                bench.untouched("reentrant/release", &[LOCK], &[A, holds, "c", "0"]),
                Reply::Nil
            );
            assert_eq!(
                bench.untouched(
                    "fair/release",
                    &[LOCK, queue, timeouts, seen],
                    &[A, holds, "c", "0"]
                ),
                Reply::Nil
            );
        }
        assert_eq!(
            bench.untouched("reentrant/inspect", &[LOCK], &[]),
            Reply::Int(-3)
        );
        assert_eq!(
            bench.untouched("reentrant/force_release", &[LOCK], &["c"]),
            Reply::Int(-3)
        );
    }
}

#[test]
fn f29_scripts_refuse_a_key_of_another_type() {
    let bench = Bench::real();
    let data: [&[&str]; 4] = [
        &["SET", LOCK, "x"],
        &["RPUSH", LOCK, "a"],
        &["SADD", LOCK, "a"],
        &["ZADD", LOCK, "1", "a"],
    ];
    for command in data {
        bench.clear();
        bench.set_up(command);
        for (script, keys, args) in every_script() {
            if script == READ_RENEW || script == WRITE_RENEW {
                assert_eq!(
                    bench.untouched(script, &keys, &texts(&args)).list(),
                    [Reply::Int(-1)],
                    "{script}"
                );
            } else {
                let error = bench.refused(script, &keys, &texts(&args));
                assert!(
                    error.starts_with("WRONGTYPE"),
                    "{script} on {command:?}: {error}"
                );
            }
        }
    }
}

/// H1, H2, F39, R111: invalid numbers are refused, whether or not the lock is held.
#[test]
fn h1_h2_f39_r111_scripts_refuse_numbers_that_are_none() {
    let bench = Bench::new();
    let no_holds: Vec<&str> = NO_COUNTS.iter().copied().chain(["0"]).collect();
    for held in 0..3 {
        bench.clear();
        match held {
            0 => {}
            1 => assert_eq!(bench.read(A, "30000", "1"), ACQUIRED),
            _ => assert_eq!(bench.write(A, "30000", "1", TRIES), ACQUIRED),
        }
        for lease in NO_LEASES {
            for holds in ["1", "2"] {
                // a lease that the server cannot add to its clock is refused where it would be
                // written
                let read = bench.read_untouched(A, lease, holds);
                assert!(
                    read.is_error() || read == Reply::Int(-2),
                    "{lease:?}: {read:?}"
                );
                let write = bench.write_untouched(A, lease, holds, TRIES);
                let busy = held == 1 && matches!(write, Reply::List(_));
                assert!(
                    write.is_error() || write == Reply::Int(-2) || busy,
                    "{lease:?}: {write:?}"
                );
            }
            for script in [READ_RENEW, WRITE_RENEW] {
                let reply = bench.untouched(script, &[LOCK], &[A, lease]);
                let no_holder = matches!(&reply, Reply::List(answers) if matches!(answers[0], Reply::Int(0 | -1)));
                assert!(
                    reply.is_error() || no_holder,
                    "{script} {lease:?}: {reply:?}"
                );
            }
        }
        for holds in &no_holds {
            bench.refused(READ, &KEYS, &[A, "30000", holds, &keys_of(A), TRIES]);
            bench.refused(WRITE, &KEYS, &[A, "30000", holds, WAITS]);
        }
        for holds in NO_COUNTS {
            bench.refused(READ_RELEASE, &RELEASES[0], &[A, holds, CHANNEL, HOLDS]);
            bench.refused(WRITE_RELEASE, &RELEASES[1], &[A, holds, CHANNEL, HOLDS]);
        }
        if held == 1 {
            for waits in ["", "x", "-1", "1.5", "2"] {
                bench.refused(READ, &KEYS, &[B, "30000", "1", &keys_of(B), waits]);
                bench.refused(WRITE, &KEYS, &[B, "30000", "1", waits]);
            }
        }
    }
}

/// F39: a record whose TTL is refused is deleted again.
#[test]
fn f39_acquire_takes_its_write_back_when_the_ttl_is_refused() {
    let bench = Bench::real();
    bench.set_up(&[
        "ACL", "SETUSER", "limited", "on", ">pw", "~*", "&*", "+@all", "-pexpire",
    ]);
    let mut limited = bench.server.wire();
    limited.call(&["AUTH", "limited", "pw"]).unwrap();
    let hold = keys_of(A);
    for (script, rest) in [(READ, vec![&*hold, TRIES]), (WRITE, vec![TRIES])] {
        let command = eval(
            &source(script),
            &KEYS,
            &[&[A, "30000", "1"], &rest[..]].concat(),
        );
        assert!(limited.call(&texts(&command)).unwrap().is_error());
        assert_eq!(bench.left(LOCK), -2, "{script}");
        bench.assert_every_key_expires();
        bench.clear();
    }
}

/// H12, F25: without memory, all acquires are refused, but releases and renewals work.
#[test]
fn h12_f25_without_memory_locks_can_be_released_and_renewed() {
    let bench = Bench::real();
    let mut ears = bench.listen(CHANNEL);
    let memory = |limit: &str| bench.set_up(&["CONFIG", "SET", "maxmemory", limit]);
    // reads
    for holds in ["1", "2", "3"] {
        assert_eq!(bench.read(A, "10000", holds), ACQUIRED);
    }
    memory("1");
    assert!(
        bench
            .refused(READ, &KEYS, &[B, "30000", "1", &keys_of(B), TRIES])
            .contains("OOM")
    );
    assert!(
        bench
            .refused(READ, &KEYS, &[A, "30000", "4", &keys_of(A), TRIES])
            .contains("OOM")
    );
    assert!(
        bench
            .refused(WRITE, &KEYS, &[B, "30000", "1", WAITS])
            .contains("OOM"),
        "an intent is one more key"
    );
    assert!(busy_ttl(&bench.write_untouched(B, "30000", "1", TRIES)) > 0);
    assert_eq!(
        bench.run(READ_RENEW, &[LOCK], &[A, "20000"]).list(),
        [Reply::Int(1)]
    );
    assert_eq!(
        bench.run(READ_RENEW, &[LOCK], &[A, "20000"]).list(),
        [Reply::Int(1)],
        "nothing to lengthen"
    );
    assert!(about(bench.left(&hold_key(A, 3)), 20_000));
    bench.set_up(&["DEL", &hold_key(A, 3)]);
    assert_eq!(bench.unread(A, "2"), Reply::Int(0));
    bench.set_up(&["DEL", &hold_key(A, 1)]);
    assert_eq!(
        bench.run(READ_RENEW, &[LOCK], &[A, "20000"]).list(),
        [Reply::Int(1)]
    );
    assert_eq!(bench.unread(A, "1"), Reply::Int(0));
    bench.assert_fields(&[(A, "1"), ("mode", "read")]);
    assert_eq!(bench.unread(A, "0"), Reply::Int(1));
    assert_eq!(bench.snapshot(), []);
    assert_eq!(ears.heard(&bench), ["1"]);
    assert!(
        bench
            .refused(READ, &KEYS, &[A, "30000", "1", &keys_of(A), TRIES])
            .contains("OOM")
    );
    assert!(
        bench
            .refused(WRITE, &KEYS, &[A, "30000", "1", "0"])
            .contains("OOM")
    );
    // writes, and a downgrade
    memory("0");
    for holds in ["1", "2"] {
        assert_eq!(bench.write(A, "10000", holds, TRIES), ACQUIRED);
    }
    assert_eq!(bench.read(A, "10000", "1"), ACQUIRED);
    memory("1");
    assert!(
        bench
            .refused(WRITE, &KEYS, &[A, "1", "3", "0"])
            .contains("OOM")
    );
    assert_eq!(
        bench.run(WRITE_RENEW, &[LOCK], &[A, "20000"]).list(),
        [Reply::Int(1)]
    );
    assert_eq!(bench.unwrite(A, "1"), Reply::Int(0));
    assert_eq!(bench.unwrite(A, "0"), Reply::Int(1));
    bench.assert_fields(&[(A, "1"), ("mode", "read")]);
    assert_eq!(
        bench.run(FORCE, &[LOCK], &[CHANNEL, HOLDS, "read"]),
        Reply::Int(1)
    );
    assert_eq!(bench.snapshot(), []);
    memory("0");
    assert_eq!(bench.write(A, "10000", "1", TRIES), ACQUIRED);
    memory("1");
    assert_eq!(
        bench.run(FORCE, &[LOCK], &[CHANNEL, HOLDS, "write"]),
        Reply::Int(1)
    );
    assert_eq!(bench.snapshot(), []);
}

/// Found by the script fuzz: a loop over a reader's count kept the server busy.
#[test]
fn a_damaged_hold_count_does_not_keep_the_server_busy() {
    let bench = Bench::new();
    for count in ["1e18", "inf", "9223372036854775807", "text", "-1"] {
        for mode in ["read", "write"] {
            for (script, keys, args) in every_script() {
                bench.clear();
                bench.set_up(&[
                    "HSET",
                    LOCK,
                    "mode",
                    mode,
                    A,
                    count,
                    &format!("{A}:write"),
                    count,
                ]);
                bench.run(script, &keys, &texts(&args));
                assert_eq!(
                    bench.call(&["PING"]),
                    Reply::Text("PONG".into()),
                    "{script} {mode} {count}"
                );
            }
        }
    }
}

#[test]
fn more_read_holds_than_there_may_be_keys_are_refused_untouched() {
    let bench = Bench::new();
    bench.set_up(&["HSET", LOCK, "mode", "read", A, "99998"]);
    bench.set_up(&["PEXPIRE", LOCK, "30000"]);
    let error = bench.refused(READ, &KEYS, &[A, "30000", "100000", &keys_of(A), TRIES]);
    assert!(error.contains("99999"), "{error}");
    assert_eq!(bench.read(A, "30000", "99999"), ACQUIRED);
}
