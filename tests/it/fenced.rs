//! Fencing tokens only rise, and a guarded key refuses a token that is lower than one it has seen.

use std::{
    path::Path,
    sync::mpsc::{self, Receiver},
    time::{Duration, Instant},
};

use nestlock::{
    AcquireOptions, Error, FencingToken, LockClient, LockGuard, OwnerId, StoreErrorKind,
};
use rand::Rng;

use crate::{
    contract::contract_suite,
    support::{
        Server,
        child::Worker,
        eventually,
        history::{self as play, GUARDED},
        wire::Reply,
    },
};

contract_suite! { mod contract, door = |client, name| client.fenced_lock(name).unwrap() }

const POLL_CAP: Duration = Duration::from_millis(200);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn shown(token: u64) -> FencingToken {
    FencingToken::try_from(token).unwrap()
}

fn token(guard: &LockGuard) -> u64 {
    guard.fencing_token().expect("a token").get()
}

async fn locked(client: &LockClient, name: &str) -> LockGuard {
    client.fenced_lock(name).unwrap().lock().await.unwrap()
}

// --- which token ---

/// A9: the documentation of [`AcquireOptions::lease`] promises this.
#[tokio::test]
async fn a_lost_guard_bars_its_owner_whose_next_token_is_higher() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.fenced_lock("l").unwrap();
    // The lease ends earlier here than on the server, because the client allows for clock drift.
    let first = lock
        .try_lock_with(AcquireOptions::new().lease(Duration::from_secs(3)))
        .await
        .unwrap()
        .unwrap();
    let before = token(&first);
    first.lost().await;
    let refused = lock.try_lock().await;
    assert!(matches!(refused, Err(Error::Lost { .. })), "{refused:?}");
    drop(first);
    let next = lock.lock().await.unwrap();
    assert!(token(&next) > before, "{} after {before}", token(&next));
    assert_eq!(
        server
            .record("l")
            .iter()
            .map(|(_, holds)| *holds)
            .collect::<Vec<_>>(),
        [1]
    );
    next.unlock().await.unwrap();
}

/// A token is the same for all holds of an owner, and higher for the next holder.
#[tokio::test]
async fn a_token_is_shared_by_an_owners_holds_and_rises_per_holder() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let lock = a.fenced_lock("l").unwrap();
    let mut last = 0;
    for _ in 0..10 {
        let outer = lock.lock().await.unwrap();
        assert!(token(&outer) > last, "{} after {last}", token(&outer));
        let inner = lock.try_lock().await.unwrap().unwrap();
        let leased = lock
            .try_lock_with(AcquireOptions::new().lease(ms(60_000)))
            .await
            .unwrap()
            .unwrap();
        assert_eq!([token(&inner), token(&leased)], [token(&outer); 2]);
        last = token(&outer);
        // The inner hold outlives the outer one, and is still the same holder's.
        outer.unlock().await.unwrap();
        let again = lock.lock().await.unwrap();
        assert_eq!(token(&again), last);
        for guard in [inner, leased, again] {
            guard.unlock().await.unwrap();
        }
        let other = locked(&b, "l").await;
        assert!(token(&other) > last);
        last = token(&other);
        other.unlock().await.unwrap();
    }
    assert_eq!(
        server.call(&["GET", "redisson_lock_token:{l}"]).text(),
        last.to_string()
    );
}

#[tokio::test]
async fn a_guard_of_a_fenced_lock_always_has_a_token() {
    let server = Server::start();
    let client = server.client().await;
    let (plain, fenced) = (
        client.reentrant_lock("l").unwrap(),
        client.fenced_lock("l").unwrap(),
    );
    let before = token(&locked(&client, "l").await);
    client.idle().await;
    let outer = plain.lock().await.unwrap();
    // The last token belongs to an earlier holder, and the lock cannot become free in between.
    let sent = server.script_count();
    let refused = fenced.lock().await;
    assert!(
        matches!(&refused, Err(Error::NoToken { .. })),
        "{refused:?}"
    );
    assert_eq!(server.script_count(), sent, "nothing was sent");
    assert_eq!((outer.fencing_token(), outer.is_lost()), (None, false));
    outer.unlock().await.unwrap();
    // In the reverse order, both are one hold with one token.
    let outer = fenced.lock().await.unwrap();
    let inner = plain.lock().await.unwrap();
    assert!(token(&outer) > before);
    assert_eq!(inner.fencing_token(), outer.fencing_token());
    for guard in [outer, inner] {
        guard.unlock().await.unwrap();
    }
    for guard in [
        client.spin_lock("l"),
        client.non_reentrant_lock("l"),
        client.fair_lock("f"),
    ] {
        assert_eq!(guard.unwrap().lock().await.unwrap().fencing_token(), None);
        client.idle().await;
    }
}

/// A token is higher after a lease that ended, and after the lock was freed by force.
#[tokio::test]
async fn a_token_rises_after_an_expired_lease_and_a_force_unlock() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (la, lb) = (a.fenced_lock("l").unwrap(), b.fenced_lock("l").unwrap());
    let expired = la
        .try_lock_with(AcquireOptions::new().lease(ms(100)))
        .await
        .unwrap()
        .unwrap();
    let next = lb.lock().await.unwrap();
    assert!(expired.is_lost() && token(&next) > token(&expired));
    assert!(la.force_unlock().await.unwrap());
    // While a guard of the lost hold is alive, this task is inside it.
    assert!(matches!(la.lock().await, Err(Error::Lost { .. })));
    let after = OwnerId::scope(la.lock()).await.unwrap();
    assert!(token(&after) > token(&next));
    // A lost guard still reports its own token.
    assert!(token(&expired) < token(&next));
    after.unlock().await.unwrap();
}

#[tokio::test]
async fn a_token_is_higher_after_the_holder_was_killed() {
    let server = Server::start();
    let client = server
        .client_with(|builder| builder.poll_cap(POLL_CAP))
        .await;
    let mut last = 0;
    for _ in 0..3 {
        let mut worker = Worker::start(&server, ms(400), POLL_CAP);
        worker.ask("fence l");
        let killed: u64 = worker.answer_to("fenced l ").parse().unwrap();
        worker.kill();
        let guard = locked(&client, "l").await;
        assert!(
            killed > last && token(&guard) > killed,
            "{last} {killed} {}",
            token(&guard)
        );
        last = token(&guard);
        guard.unlock().await.unwrap();
    }
}

/// H9: token keys live forever in a mixed fleet, but nestlock does not depend on them.
#[tokio::test]
async fn h9_tokens_survive_flushall_and_the_deletion_of_their_key() {
    let server = Server::start();
    let client = server.client().await;
    let mut last = 0;
    for round in 0..60 {
        let guard = locked(&client, "l").await;
        assert!(
            token(&guard) > last,
            "round {round}: {} after {last}",
            token(&guard)
        );
        last = token(&guard);
        if round % 3 == 0 {
            server.call(&["FLUSHALL"]);
        }
        let _ = guard.unlock().await;
        if round % 3 == 1 {
            server.call(&["DEL", "redisson_lock_token:{l}"]);
        }
    }
}

#[tokio::test]
async fn a_token_key_that_holds_no_token_is_refused_at_once() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.fenced_lock("l").unwrap();
    server.call(&["SET", "redisson_lock_token:{l}", "rubbish"]);
    let before = (server.dump(), server.script_count());
    let start = Instant::now();
    let refused = lock.lock().await.unwrap_err();
    assert!(
        start.elapsed() < Duration::from_secs(5),
        "it would have waited for an outage to end"
    );
    let Error::Store { source, .. } = &refused else {
        panic!("{refused}")
    };
    assert!(
        source.kind() == StoreErrorKind::Other && !source.may_have_executed(),
        "{refused}"
    );
    assert!(
        refused.to_string().contains("the token key holds no token"),
        "{refused}"
    );
    server.call(&["DEL", "redisson_lock_token:{l}"]);
    server.call(&["RPUSH", "redisson_lock_token:{l}", "1"]);
    assert!(matches!(lock.lock().await, Err(Error::WrongType { .. })));
    assert!(server.script_count() <= before.1 + 3, "nothing is repeated");
    server.call(&["SET", "redisson_lock_token:{l}", "rubbish"]);
    assert_eq!(server.dump(), before.0);
    assert_eq!(client.stats().holds, 0);
    server.call(&["SET", "redisson_lock_token:{l}", "41"]);
    assert_eq!(token(&lock.lock().await.unwrap()), 42);
}

// --- the guarded key ---

/// A guarded value is what was written last with the highest token.
#[tokio::test]
async fn a_guarded_value_is_the_last_write_with_the_highest_token() {
    let server = Server::start();
    let client = server
        .client_with(|builder| builder.name_prefix("app:"))
        .await;
    assert_eq!(client.fenced_get("k", shown(3)).await.unwrap(), None);
    let all_bytes: Vec<u8> = (0..=255).collect();
    for (token, value) in [
        (3, b"a".to_vec()),
        (3, b"b".to_vec()),
        (4, Vec::new()),
        (10, all_bytes),
    ] {
        client.fenced_set("k", &value, shown(token)).await.unwrap();
        assert_eq!(
            client.fenced_get("k", shown(token)).await.unwrap(),
            Some(value)
        );
    }
    for stale in [1, 9] {
        let refused = client.fenced_set("k", "late", shown(stale)).await;
        let Err(Error::StaleToken {
            key, token, seen, ..
        }) = &refused
        else {
            panic!("{refused:?}")
        };
        assert_eq!((&**key, token.get(), seen.get()), ("k", stale, 10));
        assert!(
            matches!(client.fenced_get("k", shown(stale)).await, Err(Error::StaleToken { seen, .. }) if seen.get() == 10)
        );
    }
    // The value is a plain string at its own name, without the prefix of locks.
    client
        .fenced_set("k", "1815", shown((1 << 53) - 1))
        .await
        .unwrap();
    assert_eq!(server.call(&["INCR", "k"]), Reply::Int(1816));
    assert_eq!(
        server.call(&["GET", "nestlock_fence:{k}"]),
        Reply::Text("9007199254740991".into())
    );
    assert_eq!(server.dump().len(), 2);
}

#[tokio::test]
async fn a_guarded_key_refuses_bad_input_before_anything_is_sent() {
    let server = Server::start();
    let client = server.client().await;
    let before = server.script_count();
    for bad in [0, 1 << 53, u64::MAX] {
        let refused = FencingToken::try_from(bad);
        assert!(
            matches!(&refused, Err(Error::InvalidToken { token, .. }) if *token == bad),
            "{refused:?}"
        );
    }
    let long = "x".repeat(1025);
    for bad in [
        "",
        "redisson_lock_token:{l}",
        "nestlock_fence:{k}",
        "a{b",
        "{}a",
        &*long,
    ] {
        for refused in [
            client.fenced_set(bad, "v", shown(1)).await,
            client.fenced_get(bad, shown(1)).await.map(drop),
        ] {
            assert!(
                matches!(refused, Err(Error::InvalidName { .. })),
                "{bad:?}: {refused:?}"
            );
        }
    }
    assert_eq!(server.script_count(), before);
    server.call(&["RPUSH", "list", "a"]);
    let before = server.dump();
    for refused in [
        client.fenced_set("list", "v", shown(1)).await,
        client.fenced_get("list", shown(1)).await.map(drop),
    ] {
        assert!(
            matches!(&refused, Err(Error::WrongType { lock, .. }) if lock == "list"),
            "{refused:?}"
        );
    }
    assert_eq!(server.dump(), before);
    server.call(&["SET", "nestlock_fence:{k}", "rubbish"]);
    for refused in [
        client.fenced_set("k", "v", shown(1)).await,
        client.fenced_get("k", shown(1)).await.map(drop),
    ] {
        assert!(
            matches!(&refused, Err(Error::Store { source, .. }) if !source.may_have_executed()),
            "{refused:?}"
        );
    }
    client.shutdown().await.unwrap();
    assert!(matches!(
        client.fenced_set("k", "v", shown(1)).await,
        Err(Error::Closed)
    ));
    assert!(matches!(
        client.fenced_get("k", shown(1)).await,
        Err(Error::Closed)
    ));
}

/// A guarded write without a reply is unconfirmed, and can be repeated.
#[tokio::test]
async fn a_guarded_write_with_no_reply_is_unconfirmed_and_repeatable() {
    let server = Server::start();
    let client = server
        .client_with(|builder| builder.command_timeout(ms(100)))
        .await;
    client.fenced_set("k", "a", shown(1)).await.unwrap();
    server.stop();
    let silent = client.fenced_set("k", "b", shown(2)).await;
    assert!(
        matches!(&silent, Err(Error::Unconfirmed { lock, .. }) if lock == "k"),
        "{silent:?}"
    );
    server.cont();
    eventually("the server replies again", || async {
        client.fenced_set("k", "b", shown(2)).await.is_ok()
    })
    .await;
    assert_eq!(
        client.fenced_get("k", shown(2)).await.unwrap(),
        Some(b"b".to_vec())
    );
    assert!(
        matches!(client.fenced_set("k", "a", shown(1)).await, Err(Error::StaleToken { seen, .. }) if seen.get() == 2)
    );
}

/// An ACL user needs the permissions in `lua/README.md` and `src/guide/permissions.md`, and no
/// other.
#[tokio::test]
async fn fenced_locks_and_guarded_keys_need_just_the_listed_rights() {
    let server = Server::start_real();
    let more = ["get", "set", "incr", "time", "mset", "strlen"];
    let user = |name: &str, missing: Option<&str>| {
        let keys = [
            "~app:*",
            "~redisson_lock_token:{app:*",
            "~nestlock_fence:{app:*",
        ];
        let reentrant = "evalsha eval hset hmget hlen hgetall hdel del pexpire pttl publish subscribe unsubscribe \
                         ping info";
        let commands = reentrant
            .split(' ')
            .chain(more)
            .filter(|command| Some(*command) != missing);
        let mut command = vec![
            "ACL".to_owned(),
            "SETUSER".into(),
            name.into(),
            "on".into(),
            ">pw".into(),
        ];
        command.push("resetchannels".into());
        command.push("&redisson_lock__channel:{app:*".into());
        command.extend(keys.map(Into::into));
        command.extend(commands.map(|command| format!("+{command}")));
        let reply = server.call(&command.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(!reply.is_error(), "{reply:?}");
        format!("redis://{name}:pw@{}", server.addr())
    };
    let everything = async |url: String, lock: &str| {
        let client = LockClient::connect(url).await.unwrap();
        for _ in 0..2 {
            let guard = client.fenced_lock(lock).unwrap().lock().await?;
            let inner = client.fenced_lock(lock).unwrap().lock().await?;
            client.fenced_get("app:k", shown(token(&guard))).await?;
            client
                .fenced_set("app:k", "v", shown(token(&guard)))
                .await?;
            inner.unlock().await?;
            guard.unlock().await?;
        }
        Ok::<_, Error>(())
    };
    everything(user("all", None), "app:all").await.unwrap();
    server.call(&["DEL", "nestlock_fence:{app:k}"]);
    for missing in more {
        let refused = everything(user(missing, Some(missing)), &format!("app:{missing}")).await;
        let Err(Error::Store { source, .. }) = &refused else {
            panic!("without {missing}: {refused:?}")
        };
        assert_eq!(
            source.kind(),
            StoreErrorKind::NoPermission,
            "without {missing}"
        );
    }
}

// --- processes that sleep, or die ---

/// F2, the classic case: the holder checks, is paused past its lease, wakes, and writes.
#[tokio::test]
async fn f2_a_fence_refuses_a_late_write_that_the_lock_alone_allows() {
    let server = Server::start();
    let client = server
        .client_with(|builder| builder.poll_cap(POLL_CAP))
        .await;
    for round in 0..3 {
        let (lock, plain, guarded) = (
            format!("l{round}"),
            format!("plain{round}"),
            format!("guarded{round}"),
        );
        let mut worker = Worker::start(&server, ms(600), POLL_CAP);
        worker.ask(&format!("fence {lock}"));
        let late: u64 = worker.answer_to("fenced ").parse().unwrap();
        worker.ask(&format!("put {guarded} early {late}"));
        assert_eq!(worker.answer_to("put "), "ok");
        // The process has decided on its next writes, and sleeps.
        worker.stop();
        worker.ask(&format!("set {plain} late"));
        worker.ask(&format!("put {guarded} late {late}"));

        let guard = locked(&client, &lock).await;
        assert!(token(&guard) > late);
        server.call(&["SET", &plain, "second"]);
        let read = client
            .fenced_get(&guarded, shown(token(&guard)))
            .await
            .unwrap();
        assert_eq!(read, Some(b"early".to_vec()));
        if round > 0 {
            // The read has already raised the fence.
            client
                .fenced_set(&guarded, "second", shown(token(&guard)))
                .await
                .unwrap();
        }
        if round > 1 {
            guard.unlock().await.unwrap();
        }

        worker.cont();
        assert_eq!(worker.answer_to("set "), "OK");
        assert_eq!(
            server.call(&["GET", &plain]).text(),
            "late",
            "the lock alone stops no writer"
        );
        assert_eq!(worker.answer_to("put "), "Stale");
        let kept = if round > 0 { "second" } else { "early" };
        assert_eq!(server.call(&["GET", &guarded]).text(), kept);
    }
}

/// The fence has a limit: it closes when the next holder first uses the key, not when it gets the
/// lock.
#[tokio::test]
async fn a_late_write_passes_until_the_next_holder_has_used_the_key() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let lock = a.fenced_lock("l").unwrap();
    let late = lock
        .try_lock_with(AcquireOptions::new().lease(ms(100)))
        .await
        .unwrap()
        .unwrap();
    let guard = locked(&b, "l").await;
    a.fenced_set("k", "late", shown(token(&late)))
        .await
        .unwrap();
    assert_eq!(
        b.fenced_get("k", shown(token(&guard))).await.unwrap(),
        Some(b"late".to_vec())
    );
    assert!(matches!(
        a.fenced_set("k", "later", shown(token(&late))).await,
        Err(Error::StaleToken { .. })
    ));
}

/// The guarded writes that the server accepted, in order, as read from MONITOR.
struct Accepted {
    writes: Receiver<u64>,
}

impl Accepted {
    fn watch(server: &Server, key: &str) -> Self {
        let mut wire = server.wire();
        assert_eq!(wire.call(&["MONITOR"]).unwrap().text(), "OK");
        let (sender, writes) = mpsc::channel();
        let begins = format!("\"mset\" \"nestlock_fence:{{{key}}}\" \"");
        std::thread::spawn(move || {
            while let Ok(line) = wire.read() {
                let written = line
                    .text()
                    .split_once(&begins)
                    .and_then(|(_, rest)| rest.split_once('"'));
                if let Some((token, _)) = written
                    && sender.send(token.parse().expect("a token")).is_err()
                {
                    return;
                }
            }
        });
        Self { writes }
    }

    /// Kills the server and returns all writes.
    fn all(self, server: &Server) -> Vec<u64> {
        server.kill();
        self.writes.iter().collect()
    }
}

/// The log of the workers: see `child::count`.
#[derive(Default)]
struct History {
    /// The token, when its acquire was called, and when it returned.
    given: Vec<(u64, u64, u64)>,
    accepted: Vec<u64>,
    stale: Vec<u64>,
    other: Vec<String>,
}

impl History {
    fn read(file: &Path) -> Self {
        let (text, mut history) = (std::fs::read_to_string(file).unwrap(), Self::default());
        for line in text.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let number = |n: usize| words[n].parse::<u64>().expect("a number");
            match words[0] {
                "token" => history.given.push((number(1), number(2), number(3))),
                "accepted" => history.accepted.push(number(1)),
                "stale" => history.stale.push(number(1)),
                _ => history.other.push(line.to_owned()),
            }
        }
        history
    }

    /// Returns the acquires that were called after another had returned but got no higher token,
    /// and the tokens that were given twice.
    fn inversions(&self) -> Vec<String> {
        let (mut called, mut returned) = (self.given.clone(), self.given.clone());
        called.sort_by_key(|(_, call, _)| *call);
        returned.sort_by_key(|(_, _, back)| *back);
        let (mut before, mut highest, mut found) = (returned.into_iter().peekable(), 0, Vec::new());
        for (token, call, _) in called {
            while let Some((earlier, ..)) = before.next_if(|(.., back)| *back < call) {
                highest = highest.max(earlier);
            }
            if token <= highest {
                found.push(format!("{token} after {highest}"));
            }
        }
        let mut tokens: Vec<u64> = self.given.iter().map(|(token, ..)| *token).collect();
        tokens.sort_unstable();
        found.extend(
            tokens
                .windows(2)
                .filter(|pair| pair[0] == pair[1])
                .map(|pair| format!("{} twice", pair[0])),
        );
        found
    }
}

#[test]
fn the_history_check_finds_tokens_that_go_back() {
    let history = |given: &[(u64, u64, u64)]| History {
        given: given.to_vec(),
        ..History::default()
    };
    assert!(
        history(&[(1, 0, 10), (3, 5, 30), (2, 6, 20), (4, 31, 40)])
            .inversions()
            .is_empty(),
        "they overlap"
    );
    assert_eq!(
        history(&[(2, 0, 10), (1, 11, 20)]).inversions(),
        ["1 after 2"]
    );
    assert_eq!(history(&[(2, 0, 10), (2, 5, 20)]).inversions(), ["2 twice"]);
}

/// Tokens rise one by one in the order of the store over four processes with eight tasks each.
#[test]
fn tokens_rise_one_by_one_in_store_order_over_four_processes() {
    let server = Server::start();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("history");
    let accepted = Accepted::watch(&server, "k");
    let mut workers: Vec<Worker> = (0..4)
        .map(|_| Worker::start(&server, ms(30_000), POLL_CAP))
        .collect();
    for worker in &mut workers {
        worker.ask(&format!("tokens {} l k 8 25", file.display()));
    }
    for worker in &workers {
        worker.answer_to("done");
    }
    let accepted = accepted.all(&server);
    let history = History::read(&file);
    assert_eq!(
        (history.given.len(), accepted.len(), history.stale.len()),
        (800, 800, 0),
        "{:?}",
        history.other
    );
    assert!(
        accepted.windows(2).all(|pair| pair[1] == pair[0] + 1),
        "one by one: {accepted:?}"
    );
    assert_eq!(history.inversions(), [] as [&str; 0]);
}

/// Leases end, and acquires are abandoned.
#[test]
fn tokens_rise_with_the_holds_of_32_tasks_in_four_processes() {
    let server = Server::start_real();
    let accepted = Accepted::watch(&server, GUARDED);
    for leases in [false, true] {
        let holds = play::History::play(&server, "fenced", 1, 15, leases);
        holds.assert_no_clashes();
        assert_eq!(holds.tokens_that_do_not_rise(), []);
    }
    let accepted = accepted.all(&server);
    assert!(
        accepted.len() > 200 && accepted.windows(2).all(|pair| pair[0] < pair[1]),
        "{accepted:?}"
    );
}

/// Tokens rise and no accepted write goes back while processes are killed and paused.
#[test]
fn f1_f2_kills_and_pauses_turn_no_token_or_accepted_write_back() {
    let server = Server::start();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("history");
    let accepted = Accepted::watch(&server, "k");
    let lease = ms(400);
    let spawn = || {
        let mut worker = Worker::start(&server, lease, ms(50));
        worker.ask(&format!("tokens {} l k 8 0", file.display()));
        worker
    };
    let mut workers: Vec<Worker> = (0..4).map(|_| spawn()).collect();
    let (begin, mut kills, mut pauses) = (Instant::now(), 0, 0);
    // Run until enough holders were paused between their check and their write.
    while begin.elapsed() < Duration::from_secs(8) || History::read(&file).stale.len() < 3 {
        assert!(
            begin.elapsed() < Duration::from_secs(60),
            "no stale write in a minute"
        );
        std::thread::sleep(ms(rand::rng().random_range(10..200)));
        let victim = rand::rng().random_range(0..workers.len());
        if rand::rng().random_range(0..4) == 0 {
            kills += 1;
            workers[victim].kill();
            workers[victim] = spawn();
        } else {
            pauses += 1;
            workers[victim].stop();
            let last = History::read(&file)
                .given
                .iter()
                .map(|(token, ..)| *token)
                .max()
                .unwrap_or(0);
            // If the victim holds the lock, its lease has to end first.
            let paused = Instant::now();
            while History::read(&file)
                .accepted
                .iter()
                .all(|token| *token <= last + 1)
            {
                assert!(
                    paused.elapsed() < Duration::from_secs(20),
                    "the others get nowhere"
                );
                std::thread::sleep(ms(5));
            }
            workers[victim].cont();
        }
    }
    drop(workers);
    let accepted = accepted.all(&server);
    let history = History::read(&file);
    println!(
        "{kills} kills, {pauses} pauses: {} tokens, {} writes accepted, {} refused as stale",
        history.given.len(),
        accepted.len(),
        history.stale.len()
    );
    assert!(
        accepted.windows(2).all(|pair| pair[0] < pair[1]),
        "{accepted:?}"
    );
    assert!(
        history
            .accepted
            .iter()
            .all(|token| accepted.binary_search(token).is_ok()),
        "reported as written, but not written"
    );
    assert!(
        history
            .stale
            .iter()
            .all(|token| accepted.binary_search(token).is_err()),
        "refused, but written"
    );
    assert_eq!(history.inversions(), [] as [&str; 0]);
}
