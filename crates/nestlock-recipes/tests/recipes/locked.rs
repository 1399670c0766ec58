//! Tests what the documentation of `#[locked]` promises.

use std::{
    fmt::Debug,
    future::Future,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};

use nestlock::{Error, FencingToken, LockClient, OwnerId};
use nestlock_embedded::EmbeddedServer;
use nestlock_recipes::{LockedError, locked};
use tokio::sync::{Barrier, Notify};

use crate::stage::Stage;

#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Lock(#[from] LockedError),
    #[error("another call holds the lock")]
    Busy,
    #[error("refused")]
    Refused,
}

#[derive(Debug)]
struct Order {
    shop: String,
    id: u64,
}

// --- names ---

impl Stage {
    #[locked("order:{id}", client = self.locks)]
    async fn captured(&self, id: u64) -> Result<bool, LockedError> {
        Ok(self.is_locked("order:7").await)
    }

    /// The body moves a value from which the name is made.
    #[locked("order:{}:{:03}:{{", order.shop, order.id, client = self.locks)]
    async fn positional(&self, order: Order) -> Result<(bool, Order), LockedError> {
        let moved = order;
        Ok((
            self.is_locked(&format!("order:{}:{:03}:{{", moved.shop, moved.id))
                .await,
            moved,
        ))
    }
}

#[locked(client = stage.locks)]
async fn by_its_path(stage: &Stage) -> Result<bool, LockedError> {
    Ok(stage.is_locked("recipes::locked::by_its_path").await)
}

#[locked("constant", client = stage.locks)]
async fn constant(stage: Arc<Stage>) -> Result<bool, LockedError> {
    #![allow(clippy::let_and_return)] // attributes of the body stay where they are
    Ok(stage.is_locked("constant").await)
}

#[tokio::test]
async fn the_name_is_made_of_the_arguments() {
    let stage = Arc::new(Stage::new().await);
    assert!(stage.captured(7).await.unwrap());
    assert!(!stage.captured(8).await.unwrap());
    assert!(by_its_path(&stage).await.unwrap());
    assert!(constant(Arc::clone(&stage)).await.unwrap());
    for name in ["order:7", "recipes::locked::by_its_path", "constant"] {
        assert!(!stage.is_locked(name).await, "{name}");
    }
    // a lock name must not contain an unpaired brace
    let failed = stage
        .positional(Order {
            shop: "a".into(),
            id: 7,
        })
        .await;
    assert!(
        matches!(&failed, Err(LockedError::Lock(Error::InvalidName { name, .. })) if name == "order:a:007:{")
    );
}

/// The name has the path of the module, without the surrounding function, so these two functions
/// share a lock.
#[tokio::test]
async fn a_nested_function_is_named_as_if_it_was_in_the_module() {
    let stage = Stage::new().await;
    let (one, two) = {
        #[locked(client = stage.locks)]
        async fn inside(stage: &Stage) -> Result<bool, LockedError> {
            Ok(stage.is_locked("recipes::locked::inside").await)
        }
        let one = inside(&stage).await.unwrap();
        {
            #[locked(client = stage.locks)]
            async fn inside(stage: &Stage) -> Result<bool, LockedError> {
                Ok(stage.is_locked("recipes::locked::inside").await)
            }
            (one, inside(&stage).await.unwrap())
        }
    };
    assert!(one && two);
}

#[locked("{shop}:{}", id + 1, client = clients.1)]
async fn shapes<'a, T: Debug>(
    clients: &(u8, Arc<LockClient>),
    shop: &'a str,
    id: u64,
    mut log: Vec<String>,
    (a, _): (u8, u8),
    what: impl Debug + Send,
    last: &'a T,
) -> Result<(Box<dyn Debug + Send>, &'a T), Box<dyn std::error::Error + Send + Sync>> {
    log.push(format!("{shop} {what:?} {a}"));
    if log.len() > 1 {
        return Ok((Box::new("early"), last));
    }
    let number: u32 = shop.parse()?;
    Ok((Box::new(number), last))
}

#[tokio::test]
async fn any_arguments_and_results_will_do() {
    let stage = Stage::new().await;
    let clients = (0, Arc::new(stage.locks.clone()));
    let call = |shop, log| shapes(&clients, shop, 7, log, (1, 2), "x", &'c');
    let (number, last) = call("12", vec![]).await.unwrap();
    assert_eq!(format!("{number:?}{last}"), "12c");
    assert_eq!(
        format!("{:?}", call("12", vec!["a".into()]).await.unwrap().0),
        "\"early\""
    );
    assert!(
        call("twelve", vec![])
            .await
            .unwrap_err()
            .is::<std::num::ParseIntError>()
    );
    assert!(!stage.is_locked("twelve:8").await);
}

// --- exclusion ---

#[locked("order:{id}", client = stage.locks, wait = "0s", busy = Failure::Busy)]
async fn meet(stage: &Stage, id: u64, barrier: &Barrier) -> Result<u64, Failure> {
    barrier.wait().await;
    barrier.wait().await;
    Ok(id)
}

#[locked("order:{id}", client = stage.locks, wait = NO_WAIT)]
async fn try_once(stage: &Stage, id: u64) -> Result<(), LockedError> {
    Ok(())
}

const NO_WAIT: Duration = Duration::ZERO;

#[locked("order:{id}", client = stage.locks, wait = "1ms", busy = return Ok(None))]
async fn skip(stage: &Stage, id: u64) -> Result<Option<u64>, LockedError> {
    Ok(Some(id))
}

#[tokio::test]
async fn one_name_is_held_by_one_call_and_another_name_by_another() {
    let stage = Stage::new().await;
    let barrier = Barrier::new(2);
    let meanwhile = async {
        barrier.wait().await;
        // in the same task
        let busy = meet(&stage, 7, &barrier).await;
        let other = try_once(&stage, 8).await;
        let plain = try_once(&stage, 7).await;
        let skipped = skip(&stage, 7).await;
        barrier.wait().await;
        (busy, other, plain, skipped)
    };
    let (first, (busy, other, plain, skipped)) = tokio::join!(meet(&stage, 7, &barrier), meanwhile);
    assert_eq!(first.unwrap(), 7);
    assert!(matches!(busy, Err(Failure::Busy)), "{busy:?}");
    other.unwrap();
    assert!(
        matches!(&plain, Err(error @ LockedError::Busy { lock, .. }) if lock == "order:7" && error.is_busy())
    );
    assert_eq!(skipped.unwrap(), None);
    assert_eq!(skip(&stage, 7).await.unwrap(), Some(7));
}

#[locked("counter", client = locks)]
async fn count(locks: LockClient, at_it: &AtomicU32) -> Result<(), LockedError> {
    assert_eq!(at_it.fetch_add(1, SeqCst), 0, "two are at it");
    tokio::task::yield_now().await;
    at_it.fetch_sub(1, SeqCst);
    Ok(())
}

#[tokio::test]
async fn without_a_wait_it_waits_its_turn() {
    let (stage, at_it) = (Stage::new().await, AtomicU32::new(0));
    let calls = (0..8).map(|n| {
        count(
            if n % 2 == 0 {
                &stage.locks
            } else {
                &stage.other
            }
            .clone(),
            &at_it,
        )
    });
    let calls: Vec<_> = calls.map(Box::pin).collect();
    for call in futures_util::future::join_all(calls).await {
        call.unwrap();
    }
}

// --- how the body ends ---

#[derive(Clone, Copy)]
enum End {
    Ok,
    Err,
    Return,
    Lost,
    Pause,
}

#[locked("job", client = stage.locks)]
async fn job(stage: &Stage, end: End, lose: bool) -> Result<u8, Failure> {
    if lose {
        stage.free("job").await;
    }
    match end {
        End::Ok => Ok(1),
        End::Err => Err(Failure::Refused)?,
        End::Return => return Ok(2),
        End::Lost => std::future::pending().await,
        End::Pause => {
            stage.server.pause();
            Ok(3)
        }
    }
}

#[tokio::test]
async fn it_is_free_when_the_call_returns() {
    let stage = Stage::new().await;
    assert_eq!(job(&stage, End::Ok, false).await.unwrap(), 1);
    assert!(!stage.is_locked("job").await);
    assert!(matches!(
        job(&stage, End::Err, false).await,
        Err(Failure::Refused)
    ));
    assert!(!stage.is_locked("job").await);
    assert_eq!(job(&stage, End::Return, false).await.unwrap(), 2);
    assert!(!stage.is_locked("job").await);
}

#[tokio::test]
async fn a_loss_ends_the_body_and_an_error_takes_precedence() {
    let stage = Stage::new().await;
    let lost = |outcome: &Result<u8, Failure>| {
        matches!(
            outcome,
            Err(Failure::Lock(LockedError::Lost(Error::Lost { .. })))
        )
    };
    // the next renewal notices the loss, and the body is dropped
    let outcome = job(&stage, End::Lost, true).await;
    assert!(lost(&outcome), "{outcome:?}");
    // the body ended before the renewal: the release finds out
    let outcome = job(&stage, End::Ok, true).await;
    assert!(lost(&outcome), "{outcome:?}");
    let outcome = job(&stage, End::Err, true).await;
    assert!(matches!(outcome, Err(Failure::Refused)), "{outcome:?}");
}

/// The result of a job counts even if its release is not confirmed.
#[tokio::test]
async fn a_jobs_result_counts_though_its_release_is_unconfirmed() {
    let stage = Stage::new().await;
    assert_eq!(job(&stage, End::Pause, false).await.unwrap(), 3);
    stage.server.resume();
    stage.locks.idle().await;
    assert!(!stage.is_locked("job").await);
}

#[locked("panic", client = locks)]
async fn panics(locks: LockClient) -> Result<(), LockedError> {
    panic!("as asked")
}

#[tokio::test]
async fn a_panic_releases() {
    let stage = Stage::new().await;
    assert!(
        tokio::spawn(panics(stage.locks.clone()))
            .await
            .unwrap_err()
            .is_panic()
    );
    stage.locks.idle().await;
    assert!(!stage.is_locked("panic").await);
}

#[locked("away", client = locks, wait = "1ms")]
async fn away(locks: &LockClient, ran: &AtomicBool) -> Result<(), LockedError> {
    ran.store(true, SeqCst);
    Ok(())
}

#[tokio::test]
async fn without_a_server_the_body_does_not_run() {
    let Stage { server, locks, .. } = Stage::new().await;
    drop(server);
    let ran = AtomicBool::new(false);
    let failed = away(&locks, &ran).await;
    assert!(
        matches!(&failed, Err(LockedError::Lock(error)) if error.is_transient()),
        "{failed:?}"
    );
    assert!(!ran.load(SeqCst));
}

#[locked("leased", client = locks, lease = "50ms")]
async fn leased(locks: &LockClient, end: Duration) -> Result<(), LockedError> {
    tokio::time::sleep(end).await;
    Ok(())
}

#[tokio::test]
async fn a_lease_ends_the_body() {
    let stage = Stage::new().await;
    let outcome = leased(&stage.locks, Duration::MAX).await;
    assert!(matches!(outcome, Err(LockedError::Lost(_))), "{outcome:?}");
    leased(&stage.other, Duration::ZERO).await.unwrap();
}

#[locked("dropped", client = locks)]
async fn dropped(locks: &LockClient) -> Result<(), LockedError> {
    for _ in 0..3 {
        tokio::task::yield_now().await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_at_any_poll_nothing_stays_held() {
    let stage = Stage::new().await;
    for contended in [false, true] {
        stage
            .at_every_poll("dropped", contended, || dropped(&stage.locks))
            .await;
    }
}

// --- kinds ---

#[locked("k", client = locks, kind = "fenced", guard = held)]
async fn fenced(locks: &LockClient) -> Result<Option<FencingToken>, LockedError> {
    assert_eq!(held.name(), "k");
    Ok(held.fencing_token())
}

#[locked("k", client = locks, kind = "reentrant")]
async fn outer(locks: &LockClient) -> Result<u32, LockedError> {
    inner(locks).await
}

#[locked("k", client = locks, kind = "reentrant", wait = "0s", guard = held)]
async fn inner(locks: &LockClient) -> Result<u32, LockedError> {
    let holds = locks
        .reentrant_lock("k")
        .unwrap()
        .hold_count(&held.owner())
        .await;
    holds.map_err(LockedError::Lock)
}

#[locked("k", client = locks, kind = "reentrant", owner = owner.clone(), guard = held)]
async fn as_owner(locks: &LockClient, owner: OwnerId) -> Result<bool, LockedError> {
    Ok(held.owner() == owner)
}

#[locked("k", client = locks, kind = "read")]
async fn read(locks: &LockClient, barrier: &Barrier) -> Result<(), LockedError> {
    barrier.wait().await;
    assert!(
        locks
            .read_write_lock("k")
            .unwrap()
            .try_read()
            .await
            .unwrap()
            .is_some()
    );
    Ok(())
}

#[locked("k", client = locks, kind = "write")]
async fn write(locks: &LockClient, other: &LockClient) -> Result<(), LockedError> {
    assert!(
        other
            .read_write_lock("k")
            .unwrap()
            .try_read()
            .await
            .unwrap()
            .is_none()
    );
    Ok(())
}

#[locked("k", client = locks, kind = "non_reentrant", wait = "1h")]
async fn non_reentrant(locks: &LockClient, nested: bool) -> Result<(), LockedError> {
    if nested {
        Ok(())
    } else {
        Box::pin(non_reentrant(locks, true)).await
    }
}

#[locked("k", client = locks, kind = "non_reentrant_fair", wait = "1h")]
async fn non_reentrant_fair(locks: &LockClient, nested: bool) -> Result<(), LockedError> {
    if nested {
        Ok(())
    } else {
        Box::pin(non_reentrant_fair(locks, true)).await
    }
}

#[tokio::test]
async fn each_kind_is_the_door_of_that_name() {
    let Stage { locks, other, .. } = &Stage::new().await;
    let (first, second) = (fenced(locks).await.unwrap(), fenced(locks).await.unwrap());
    assert!(first.is_some() && first < second);
    assert_eq!(outer(locks).await.unwrap(), 2);
    assert!(as_owner(locks, locks.owner("job").unwrap()).await.unwrap());
    let barrier = Barrier::new(2);
    let (a, b) = tokio::join!(read(locks, &barrier), read(other, &barrier));
    a.and(b).unwrap();
    write(locks, other).await.unwrap();
    let nested = [
        non_reentrant(locks, false).await,
        non_reentrant_fair(locks, false).await,
    ];
    for nested in nested {
        assert!(
            matches!(&nested, Err(LockedError::Lock(Error::NotReentrant { .. }))),
            "{nested:?}"
        );
    }
}

#[locked("fair", client = locks, kind = "fair")]
async fn fair(locks: &LockClient, other: &LockClient) -> Result<bool, LockedError> {
    Ok(other.fair_lock("fair").unwrap().is_locked().await.unwrap())
}

#[locked("spin", client = locks, kind = "spin")]
async fn spin(locks: &LockClient, other: &LockClient) -> Result<bool, LockedError> {
    Ok(other.spin_lock("spin").unwrap().is_locked().await.unwrap())
}

#[locked("string", client = locks, kind = "string")]
async fn string(locks: &LockClient, other: &LockClient) -> Result<bool, LockedError> {
    Ok(other
        .string_lock("string")
        .unwrap()
        .is_locked()
        .await
        .unwrap())
}

#[locked("signal", client = locks, kind = "signal")]
async fn signal(locks: &LockClient, other: &LockClient) -> Result<bool, LockedError> {
    Ok(other
        .signal_lock("signal")
        .unwrap()
        .is_locked()
        .await
        .unwrap())
}

#[tokio::test]
async fn each_record_is_that_of_its_kind() {
    let Stage { locks, other, .. } = &Stage::new().await;
    assert!(fair(locks, other).await.unwrap());
    assert!(spin(locks, other).await.unwrap());
    assert!(string(locks, other).await.unwrap());
    assert!(signal(locks, other).await.unwrap());
}

struct Shops {
    nodes: Vec<LockClient>,
}

impl Shops {
    #[locked("shop:{shop}", client = self.nodes, kind = "red", tries = 2, delay = "1ms..2ms", drift = 0.02)]
    async fn rename(
        &self,
        shop: &str,
        renaming: &Notify,
        renamed: &Notify,
    ) -> Result<(), LockedError> {
        renaming.notify_one();
        renamed.notified().await;
        Ok(())
    }
}

#[locked("shop:{shop}", client = [a, b, c], kind = "red", wait = "1ms", lease = "1s")]
async fn rename(
    a: &LockClient,
    b: &LockClient,
    c: &LockClient,
    shop: &str,
) -> Result<(), LockedError> {
    Ok(())
}

#[tokio::test]
async fn a_red_lock_is_held_on_several_servers_and_its_tries_end() {
    let mut servers: Vec<_> = (0..3).map(|_| EmbeddedServer::start().unwrap()).collect();
    let mut nodes = Vec::new();
    for server in &servers {
        nodes.push(LockClient::connect(server.url()).await.unwrap());
    }
    let shops = Shops {
        nodes: nodes.clone(),
    };
    let [a, b, c] = &nodes[..] else {
        unreachable!("three")
    };
    let (renaming, renamed) = (Notify::new(), Notify::new());
    let meanwhile = async {
        renaming.notified().await;
        assert!(b.string_lock("shop:7").unwrap().is_locked().await.unwrap());
        let busy = [
            shops.rename("7", &renaming, &renamed).await,
            rename(a, b, c, "7").await,
        ];
        renamed.notify_one();
        busy
    };
    let (outcome, busy) = tokio::join!(shops.rename("7", &renaming, &renamed), meanwhile);
    outcome.unwrap();
    assert!(
        busy.iter()
            .all(|busy| matches!(busy, Err(LockedError::Busy { lock, .. }) if lock == "shop:7")),
        "{busy:?}"
    );
    // a minority of the servers may be down
    drop(servers.pop());
    renamed.notify_one();
    shops.rename("7", &renaming, &renamed).await.unwrap();
}

// --- what the attribute does not change ---

#[async_trait::async_trait]
trait Warehouse {
    async fn store(&mut self, shelf: u32, what: String) -> Result<bool, LockedError>;
}

#[async_trait::async_trait]
impl Warehouse for Stage {
    #[locked("shelf:{shelf}:{}", what, client = self.locks, wait = "2s")]
    async fn store(&mut self, shelf: u32, what: String) -> Result<bool, LockedError> {
        let what = what + ":rock";
        if shelf == 0 {
            return Ok(false);
        }
        Ok(self
            .is_locked(&format!("shelf:{shelf}:{}", what.trim_end_matches(":rock")))
            .await)
    }
}

#[tokio::test]
async fn an_async_trait_may_be_locked() {
    let mut stage: Box<dyn Warehouse> = Box::new(Stage::new().await);
    assert!(stage.store(7, "salt".into()).await.unwrap());
    assert!(!stage.store(0, "salt".into()).await.unwrap());
}

#[locked("local", client = locks)]
async fn not_send(locks: &LockClient) -> Result<u8, LockedError> {
    let local = Rc::new(1);
    tokio::task::yield_now().await;
    Ok(*local)
}

fn is_send<F: Future + Send>(call: F) -> F {
    call
}

#[tokio::test]
async fn the_future_is_send_if_the_body_is() {
    let stage = Stage::new().await;
    is_send(stage.captured(7)).await.unwrap();
    is_send(stage.positional(Order {
        shop: "b".into(),
        id: 7,
    }))
    .await
    .unwrap_err();
    assert_eq!(not_send(&stage.locks).await.unwrap(), 1);
}

/// Notes whether the lock is created inside the span.
fn noted<'a>(locks: &'a LockClient, in_span: &mut bool) -> &'a LockClient {
    *in_span = tracing::Span::current()
        .metadata()
        .is_some_and(|span| span.name() == "waits");
    locks
}

#[locked("span", client = noted(locks, in_span))]
#[tracing::instrument(skip_all)]
async fn waits(locks: &LockClient, in_span: &mut bool) -> Result<(), LockedError> {
    Ok(())
}

#[tokio::test]
async fn above_instrument_the_wait_is_in_the_span() {
    let _subscriber = tracing::subscriber::set_default(tracing_subscriber::registry());
    let (stage, mut in_span) = (Stage::new().await, false);
    waits(&stage.locks, &mut in_span).await.unwrap();
    assert!(in_span);
}

mod front {
    pub(crate) use nestlock_recipes as recipes;
}

#[locked("elsewhere", client = locks, crate = front::recipes)]
async fn elsewhere(locks: &LockClient) -> Result<(), front::recipes::LockedError> {
    Ok(())
}

#[tokio::test]
async fn the_crate_may_have_another_path() {
    elsewhere(&Stage::new().await.locks).await.unwrap();
}
