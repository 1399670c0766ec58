//! Notes of holders: who holds a lock, and why.

use std::time::{Duration, Instant, SystemTime};

use nestlock::{AcquireOptions, Error, HolderNote, Lock, LockClient, OwnerId};

use crate::support::{
    Server, eventually,
    proxy::{Action, Proxy, Verb},
};

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn because(note: &str) -> AcquireOptions {
    AcquireOptions::new().note(note)
}

/// Returns the key of an owner's note of the lock `l`.
fn key(owner: &OwnerId) -> String {
    format!("nestlock_note:{{l}}:{owner}")
}

/// Returns the texts of the notes, in order.
async fn said(lock: &Lock) -> Vec<String> {
    let notes = lock.notes().await.unwrap();
    let mut said: Vec<_> = notes.into_iter().map(|note| note.note).collect();
    said.sort_unstable();
    said
}

/// Waits until these are the notes: a note is written after the acquire, and erased after the release.
async fn says(lock: &Lock, notes: &[&str]) {
    eventually(&format!("the notes {notes:?}"), || async {
        said(lock).await == notes
    })
    .await;
}

async fn is_gone(server: &Server, owner: &OwnerId) {
    eventually("the note is erased", || async {
        !server.exists(&key(owner))
    })
    .await;
}

#[tokio::test]
async fn a_note_says_who_and_why_until_the_release() {
    let server = Server::start();
    let named = |builder: nestlock::LockClientBuilder| builder.application("shop");
    let client = server.client_with(named).await;
    let lock = client.mutex("l").unwrap();
    assert_eq!(lock.notes().await.unwrap(), []);
    let before = SystemTime::now();
    let guard = lock.lock_with(because("nightly import")).await.unwrap();
    says(&lock, &["nightly import"]).await;
    let HolderNote {
        owner,
        since,
        application,
        process,
        host,
        ..
    } = lock.notes().await.unwrap().remove(0);
    assert_eq!((&owner, &*application), (&guard.owner(), "shop"));
    assert_eq!(process, std::process::id());
    assert!(!host.is_empty() && !host.contains(':'), "{host}");
    assert!(since + ms(1) > before && since <= SystemTime::now());
    // never longer than the record
    let (note, record) = (server.pttl(&key(&owner)), server.pttl("l"));
    assert!(0 < note && note <= record, "{note} {record}");
    guard.unlock().await.unwrap();
    is_gone(&server, &owner).await;
    assert_eq!(server.dump(), []);
}

/// Two requests more for those that have a note, none for others, and nothing waits for them.
#[tokio::test]
async fn only_holds_with_a_note_cost_more() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.mutex("l").unwrap();
    let before = server.script_count();
    for _ in 0..10 {
        lock.lock().await.unwrap().unlock().await.unwrap();
    }
    assert_eq!(server.script_count() - before, 20);
    let guard = lock.lock_with(because("x")).await.unwrap();
    let owner = guard.owner();
    eventually("it is written", || async { server.exists(&key(&owner)) }).await;
    guard.unlock().await.unwrap();
    is_gone(&server, &owner).await;
    assert_eq!(server.script_count() - before, 24);
}

#[tokio::test]
async fn neither_acquire_nor_release_waits_for_a_note() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let client = LockClient::connect(&proxy.url()).await.unwrap();
    let lock = client.mutex("l").unwrap();
    proxy.each(Verb::Note, Action::Swallow);
    let began = Instant::now();
    for _ in 0..3 {
        let guard = lock.lock_with(because("x")).await.unwrap();
        guard.unlock().await.unwrap();
    }
    // the command timeout is 3 s
    assert!(began.elapsed() < ms(2_000), "{:?}", began.elapsed());
    eventually("it is free", || async { !server.exists("l") }).await;
}

/// The watchdog renews the record, and the note stays beside it.
#[tokio::test]
async fn a_note_lives_as_long_as_its_hold() {
    let server = Server::start();
    let short = |builder: nestlock::LockClientBuilder| builder.watchdog_timeout(ms(900));
    let client = server.client_with(short).await;
    let lock = client.mutex("l").unwrap();
    let guard = lock.lock_with(because("long")).await.unwrap();
    says(&lock, &["long"]).await;
    let first = lock.notes().await.unwrap();
    tokio::time::sleep(ms(2_000)).await;
    eventually("it is there", || async {
        server.exists(&key(&guard.owner()))
    })
    .await;
    assert_eq!(lock.notes().await.unwrap(), first, "since the acquire");
    assert!(server.pttl(&key(&guard.owner())) <= 900);
    guard.unlock().await.unwrap();

    // a lease that is extended
    let leased = because("leased").lease(ms(1_000));
    let guard = lock.lock_with(leased).await.unwrap();
    guard.extend(Duration::from_secs(100)).await.unwrap();
    let owner = guard.owner();
    eventually("its TTL has grown", || async {
        server.pttl(&key(&owner)) > 50_000
    })
    .await;
    guard.unlock().await.unwrap();
    is_gone(&server, &owner).await;
}

/// A note whose lease is not extended is written once, and a hold that is left to it leaves its note.
#[tokio::test]
async fn a_note_is_left_to_the_lease_with_its_hold() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.mutex("l").unwrap();
    let leased = because("left").lease(ms(1_500));
    let guard = lock.lock_with(leased).await.unwrap();
    let owner = guard.owner();
    says(&lock, &["left"]).await;
    guard.leave_to_lease();
    tokio::time::sleep(ms(300)).await;
    let before = server.script_count();
    assert_eq!(said(&lock).await, ["left"]);
    assert_eq!(server.script_count() - before, 2, "and no write");
    is_gone(&server, &owner).await;
    eventually("the lease is over", || async { !server.exists("l") }).await;
}

/// The first note counts until the owner has released all its holds.
#[tokio::test]
async fn nested_holds_keep_the_first_note() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.reentrant_lock("l").unwrap();
    let outer = lock.lock().await.unwrap();
    let middle = lock.lock_with(because("import")).await.unwrap();
    let inner = lock.lock_with(because("one row")).await.unwrap();
    says(&lock, &["import"]).await;
    middle.unlock().await.unwrap();
    inner.unlock().await.unwrap();
    assert_eq!(said(&lock).await, ["import"]);
    let owner = outer.owner();
    outer.unlock().await.unwrap();
    is_gone(&server, &owner).await;
    // the next hold of this owner has none
    let guard = lock.lock().await.unwrap();
    assert_eq!(said(&lock).await, [""; 0]);
    guard.unlock().await.unwrap();
}

/// A mutex passes from task to task under one name, each with its own note, or with none.
#[tokio::test]
async fn each_holder_of_a_relayed_mutex_has_its_own_note() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.mutex("l").unwrap();
    let mut guard = lock.lock_with(because("0")).await.unwrap();
    for n in 1..20 {
        let options = match n % 3 {
            0 => AcquireOptions::new(),
            _ => because(&n.to_string()),
        };
        let waits = lock.clone();
        let next = tokio::spawn(async move { waits.lock_with(options).await });
        eventually("it waits", || async { client.stats().waiters == 1 }).await;
        guard.unlock().await.unwrap();
        guard = next.await.unwrap().unwrap();
        match n % 3 {
            0 => says(&lock, &[]).await,
            _ => says(&lock, &[&n.to_string()]).await,
        }
    }
    guard.unlock().await.unwrap();
    eventually("nothing is left", || async { server.dump().is_empty() }).await;
}

#[tokio::test]
async fn all_holders_of_a_shared_lock_have_notes() {
    let server = Server::start();
    let client = server.client().await;
    let both = client.read_write_lock("l").unwrap();
    let readers = both.owner_per_acquire().read_lock();
    let permits = client.permits("p", 3).unwrap().many(1).unwrap();
    for lock in [readers, permits] {
        let a = lock.lock_with(because("a")).await.unwrap();
        let none = lock.lock().await.unwrap();
        let b = lock.lock_with(because("b")).await.unwrap();
        says(&lock, &["a", "b"]).await;
        a.unlock().await.unwrap();
        says(&lock, &["b"]).await;
        none.unlock().await.unwrap();
        b.unlock().await.unwrap();
    }
    let keys = || server.dump().into_iter().map(|(key, ..)| key);
    let only_counter = || async { keys().eq(["p".to_owned()]) };
    eventually("no note is left", only_counter).await;
}

/// Of several locks each has the note, and a RedLock's is told once.
#[tokio::test]
async fn several_locks_have_one_note() {
    let servers = [Server::start(), Server::start(), Server::start()];
    let mut clients = Vec::new();
    for server in &servers {
        clients.push(server.client().await);
    }
    let members = ["a", "b"].map(|name| clients[0].reentrant_lock(name).unwrap());
    let multi = clients[0].multi_lock(members.to_vec()).unwrap();
    let red = LockClient::red_lock(&clients, "r", nestlock::RedLockOptions::new()).unwrap();
    for lock in [&multi, &red] {
        let guard = lock.lock_with(because("both")).await.unwrap();
        says(lock, &["both"]).await;
        for member in lock.members() {
            says(member, &["both"]).await;
        }
        guard.unlock().await.unwrap();
        says(lock, &[]).await;
    }
    let guard = red.lock_with(because("most")).await.unwrap();
    servers[0].kill();
    says(&red, &["most"]).await;
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn a_note_that_is_no_line_of_text_is_refused() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.mutex("l").unwrap();
    let before = server.script_count();
    for bad in [
        "",
        "a\nb",
        "\u{7}",
        "tab\tbed",
        "\u{202e}turned",
        "a\u{2028}b",
        "\u{202e}x",
        "a\u{2028}b",
        &"x".repeat(257),
        &"ä".repeat(129),
    ] {
        let refused = lock.try_lock_with(because(bad)).await.unwrap_err();
        assert!(matches!(refused, Error::InvalidNote { .. }), "{refused}");
        assert_eq!(refused.lock_name(), Some("l"));
    }
    assert_eq!(server.script_count(), before, "nothing is sent");
    let longest = "ä".repeat(128);
    let guard = lock.lock_with(because(&longest)).await.unwrap();
    says(&lock, &[&longest]).await;
    guard.unlock().await.unwrap();
}

/// A user without access to notes has its locks all the same.
#[tokio::test]
async fn a_server_that_refuses_notes_costs_no_lock() {
    let server = Server::start_real();
    let rules = ["ACL", "SETUSER", "locks", "on", ">pw", "&*", "+@all", "~l"];
    assert!(!server.call(&rules).is_error());
    let url = format!("redis://locks:pw@{}", server.addr());
    let client = LockClient::connect(&url).await.unwrap();
    let lock = client.mutex("l").unwrap();
    for _ in 0..3 {
        let guard = lock.lock_with(because("x")).await.unwrap();
        assert!(!guard.is_lost());
        guard.unlock().await.unwrap();
    }
    let guard = lock.lock_with(because("x")).await.unwrap();
    let refused = lock.notes().await.unwrap_err();
    assert!(refused.to_string().contains("NOPERM"), "{refused}");
    guard.unlock().await.unwrap();
}

/// Locks use the same connection: many notes that are due at once must not make their requests late.
#[tokio::test]
async fn few_notes_are_in_flight_at_once() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let client = LockClient::builder().watchdog_timeout(ms(3_000));
    let client = client.connect(proxy.url()).await.unwrap();
    let mut guards = Vec::new();
    for n in 0..200 {
        let lock = client.mutex(format!("l{n}")).unwrap();
        guards.push(lock.lock_with(because("x")).await.unwrap());
    }
    let written = || async { server.dump().len() == 400 };
    eventually("all are written", written).await;
    proxy.forget_requests();
    proxy.each(Verb::Note, Action::Held);
    eventually("they are due again", || async {
        proxy.count(Verb::Note) >= 32
    })
    .await;
    tokio::time::sleep(ms(200)).await;
    assert_eq!(proxy.count(Verb::Note), 32);
    proxy.pass();
    proxy.let_go();
    for guard in guards {
        guard.unlock().await.unwrap();
    }
}

/// The earlier holder's process may have counted further.
#[tokio::test]
async fn a_value_that_is_used_again_has_the_new_note() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (first, second) = (a.string_lock("l").unwrap(), b.string_lock("l").unwrap());
    let held = because("first").value("v").lease(Duration::from_secs(600));
    let guard = first.lock_with(held).await.unwrap();
    says(&first, &["first"]).await;
    let owner = guard.owner();
    guard.leave_to_lease();
    second.release(&owner).await.unwrap();
    let guard = second
        .lock_with(because("second").value("v"))
        .await
        .unwrap();
    says(&second, &["second"]).await;
    guard.unlock().await.unwrap();
    says(&second, &[]).await;
}

/// An owner has one note at a time: the last one, and the one before it after that.
#[tokio::test]
async fn a_writer_that_reads_has_its_note_back() {
    let server = Server::start();
    let short = |builder: nestlock::LockClientBuilder| builder.watchdog_timeout(ms(900));
    let client = server.client_with(short).await;
    let both = client.read_write_lock("l").unwrap();
    let writer = both
        .write_lock()
        .lock_with(because("writes"))
        .await
        .unwrap();
    says(&both.write_lock(), &["writes"]).await;
    let reader = both.read_lock().lock_with(because("reads")).await.unwrap();
    says(&both.write_lock(), &["reads"]).await;
    reader.unlock().await.unwrap();
    says(&both.write_lock(), &["writes"]).await;
    writer.unlock().await.unwrap();
}

/// While the server is away a note waits, and it is written when the server is back.
#[tokio::test]
async fn a_note_is_written_once_the_server_replies() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let client = LockClient::connect(&proxy.url()).await.unwrap();
    let lock = client.mutex("l").unwrap();
    proxy.each(Verb::Note, Action::Refuse("LOADING Redis is loading"));
    let guard = lock.lock_with(because("late")).await.unwrap();
    eventually("it is tried", || async { proxy.count(Verb::Note) >= 2 }).await;
    assert!(!server.exists(&key(&guard.owner())));
    proxy.pass();
    says(&lock, &["late"]).await;
    guard.unlock().await.unwrap();
}
