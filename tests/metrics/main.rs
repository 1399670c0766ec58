//! The metrics and their names, read through the Prometheus exporter, as users read them. These
//! tests are a process of their own, because each process has only one recorder.
#![allow(clippy::unwrap_used, clippy::float_cmp)]

use std::{
    env, fmt,
    io::{self, Write},
    process::Command,
    sync::{
        Arc, LazyLock, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use nestlock::{AcquireOptions, Error, LockClient, LossReason};
use nestlock_embedded::EmbeddedServer;
use tokio::time::{Instant, sleep, timeout};
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    Layer,
    fmt::format::FmtSpan,
    layer::{Context, SubscriberExt},
    util::SubscriberInitExt,
};

static RECORDER: LazyLock<PrometheusHandle> = LazyLock::new(|| {
    let builder = PrometheusBuilder::new()
        .set_buckets(&[0.001, 0.01, 0.1, 1.0])
        .unwrap();
    builder
        .with_recommended_naming(true)
        .install_recorder()
        .unwrap()
});

const SOON: Duration = Duration::from_secs(20);

/// Returns the value of the only line that has all of these parts, or `None` if there is no such
/// line.
fn value(parts: &[&str]) -> Option<f64> {
    let text = RECORDER.render();
    let lines: Vec<&str> = text
        .lines()
        .filter(|line| !line.starts_with('#') && parts.iter().all(|part| line.contains(part)))
        .collect();
    match lines[..] {
        [] => None,
        [line] => line.rsplit_once(' ')?.1.parse().ok(),
        _ => panic!("{parts:?} are in {lines:#?}"),
    }
}

async fn eventually(parts: &[&str], wanted: impl Fn(f64) -> bool) {
    let start = Instant::now();
    while !value(parts).is_some_and(&wanted) {
        assert!(
            start.elapsed() < SOON,
            "{parts:?}: {:?}\n{}",
            value(parts),
            RECORDER.render()
        );
        sleep(Duration::from_millis(10)).await;
    }
}

/// A busy machine may stop this process for a second: no lease ends in that time.
const LEASE: Duration = Duration::from_secs(2);

async fn client(server: &EmbeddedServer, class: fn(&str) -> &'static str) -> LockClient {
    LazyLock::force(&RECORDER);
    let builder = LockClient::builder()
        .metrics_class(class)
        .watchdog_timeout(LEASE);
    builder
        .poll_cap(Duration::from_millis(200))
        .connect(server.url())
        .await
        .unwrap()
}

/// Each outcome of an acquire has its own label, so that dashboards can tell a timeout from an
/// error.
#[tokio::test]
async fn acquires_are_counted_by_what_they_came_to() {
    let server = EmbeddedServer::start().unwrap();
    let client = client(&server, |_| "acquires").await;
    let (lock, other) = (
        client.reentrant_lock("l").unwrap(),
        client.mutex("l").unwrap(),
    );
    let count = |outcome: &str| {
        let outcome = format!("outcome=\"{outcome}\"");
        value(&[
            "nestlock_acquire_duration_seconds_count",
            "class=\"acquires\"",
            "kind=\"reentrant\"",
            &outcome,
        ])
    };
    let outer = lock.lock().await.unwrap();
    let inner = lock.lock().await.unwrap();
    assert!(other.try_lock().await.unwrap().is_none());
    assert!(
        other
            .try_lock_for(Duration::from_millis(50))
            .await
            .unwrap()
            .is_none()
    );
    timeout(Duration::from_millis(50), other.lock())
        .await
        .unwrap_err();
    other
        .try_lock_with(AcquireOptions::new().lease(Duration::ZERO))
        .await
        .unwrap_err();
    assert_eq!(
        [count("acquired"), count("reentered"), count("busy")],
        [Some(1.0); 3]
    );
    assert_eq!(
        [count("timeout"), count("cancelled"), count("error")],
        [Some(1.0); 3]
    );
    assert!(RECORDER.render().contains("error_type=\"invalid_lease\""));
    let waited = value(&[
        "nestlock_acquire_duration_seconds_sum",
        "class=\"acquires\"",
        "outcome=\"timeout\"",
    ])
    .unwrap();
    assert!((0.045..5.0).contains(&waited), "{waited} s");
    inner.unlock().await.unwrap();
    outer.unlock().await.unwrap();
    assert_eq!(
        value(&[
            "nestlock_hold_duration_seconds_count",
            "class=\"acquires\"",
            "end=\"released\""
        ]),
        Some(1.0)
    );
}

#[tokio::test]
async fn losses_and_renewals_are_counted() {
    let server = EmbeddedServer::start().unwrap();
    let client = client(&server, |_| "losses").await;
    let guard = client.fenced_lock("l").unwrap().lock().await.unwrap();
    let of = |name: &'static str, label: &'static str| {
        [name, "class=\"losses\"", "kind=\"fenced\"", label]
    };
    eventually(
        &of("nestlock_renewals_total", "outcome=\"renewed\""),
        |renewals| renewals >= 2.0,
    )
    .await;
    eventually(&["nestlock_renewal_lateness_seconds_count"], |renewals| {
        renewals >= 2.0
    })
    .await;
    client
        .fenced_lock("l")
        .unwrap()
        .force_unlock()
        .await
        .unwrap();
    timeout(SOON, guard.lost()).await.unwrap();
    eventually(
        &of("nestlock_losses_total", "reason=\"record_missing\""),
        |losses| losses == 1.0,
    )
    .await;
    assert_eq!(
        value(&of("nestlock_hold_duration_seconds_count", "end=\"lost\"")),
        Some(1.0)
    );
    drop(guard);
    // a hold that was left to its lease ends without a loss
    let lease = AcquireOptions::new().lease(Duration::from_millis(100));
    client
        .fenced_lock("l")
        .unwrap()
        .lock_with(lease)
        .await
        .unwrap()
        .leave_to_lease();
    eventually(
        &of(
            "nestlock_hold_duration_seconds_count",
            "end=\"left_to_lease\"",
        ),
        |ended| ended == 1.0,
    )
    .await;
    assert_eq!(
        value(&of("nestlock_losses_total", "reason=\"lease_expired\"")),
        None
    );
}

/// A deploy shuts down clients that hold locks, which must not raise an alert.
#[tokio::test]
async fn a_hold_that_a_shutdown_ends_is_no_loss() {
    let server = EmbeddedServer::start().unwrap();
    let client = client(&server, |_| "deploy").await;
    let guard = client.mutex("l").unwrap().lock().await.unwrap();
    client.shutdown().await.unwrap();
    assert!(matches!(
        guard.lost().await,
        Error::Lost {
            reason: LossReason::ShutDown,
            ..
        }
    ));
    let ended = [
        "nestlock_hold_duration_seconds_count",
        "class=\"deploy\"",
        "end=\"shut_down\"",
    ];
    eventually(&ended, |ended| ended == 1.0).await;
    assert_eq!(value(&["nestlock_losses_total", "class=\"deploy\""]), None);
}

#[tokio::test]
async fn waiters_and_what_woke_them_are_counted() {
    let server = EmbeddedServer::start().unwrap();
    let client = client(&server, |lock| {
        if lock.starts_with("fast") {
            "heard"
        } else {
            "looked"
        }
    })
    .await;
    let held = client.mutex("fast").unwrap().lock().await.unwrap();
    let waits = client.mutex("fast").unwrap();
    let waiter = tokio::spawn(async move { waits.lock().await.unwrap() });
    let level = |name: &'static str| [name, "class=\"heard\"", "kind=\"reentrant\""];
    eventually(&level("nestlock_waiters{"), |waiters| waiters == 1.0).await;
    eventually(&level("nestlock_held{"), |held| held == 1.0).await;
    assert_eq!(
        (client.stats().waiters, client.stats().holds > 0),
        (1, true)
    );
    held.unlock().await.unwrap();
    let guard = timeout(SOON, waiter).await.unwrap().unwrap();
    assert!(
        value(&[
            "nestlock_wakeups_total",
            "class=\"heard\"",
            "source=\"message\""
        ])
        .unwrap()
            >= 1.0
    );
    // no message says that a lease is over
    let lease = AcquireOptions::new().lease(Duration::from_millis(500));
    client
        .mutex("slow")
        .unwrap()
        .lock_with(lease)
        .await
        .unwrap()
        .leave_to_lease();
    drop(client.mutex("slow").unwrap().lock().await.unwrap());
    eventually(
        &[
            "nestlock_wakeups_total",
            "class=\"looked\"",
            "source=\"poll\"",
        ],
        |looks| looks >= 1.0,
    )
    .await;
    eventually(
        &["nestlock_settlements_total", "outcome=\"settled\""],
        |settled| settled >= 1.0,
    )
    .await;
    guard.unlock().await.unwrap();
    // a client that ends takes its own share out of the gauge
    client.shutdown().await.unwrap();
    drop(client);
    eventually(&level("nestlock_held{"), |held| held == 0.0).await;
}

/// The log output of this test's thread.
#[derive(Clone, Default)]
struct Written(Arc<Mutex<Vec<u8>>>);

impl Write for Written {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
#[ignore = "run by `what_has_a_process_of_its_own`"]
async fn an_acquire_is_a_span() {
    let written = Written::default();
    let writer = written.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::DEBUG)
        .with_span_events(FmtSpan::CLOSE);
    let subscriber = subscriber
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    let _here = tracing::subscriber::set_default(subscriber);
    let server = EmbeddedServer::start().unwrap();
    let client = client(&server, |_| "spans").await;
    let lock = client.fenced_lock("l").unwrap();
    let guard = lock.lock().await.unwrap();
    assert!(
        client
            .mutex("l")
            .unwrap()
            .try_lock()
            .await
            .unwrap()
            .is_none()
    );
    timeout(Duration::from_millis(50), client.mutex("l").unwrap().lock())
        .await
        .unwrap_err();
    let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
    let spans: Vec<&str> = text
        .lines()
        .filter(|line| line.contains("nestlock.acquire{") && line.contains("close"))
        .collect();
    let token = format!("token={}", guard.fencing_token().unwrap().get());
    for (span, parts) in spans.iter().zip([
        ["kind=\"fenced\"", "outcome=\"acquired\"", &*token],
        [
            "kind=\"reentrant\"",
            "outcome=\"busy\"",
            "otel.kind=\"client\"",
        ],
        ["lock=\"l\"", "outcome=\"cancelled\"", "waited_ms="],
    ]) {
        assert!(
            parts.iter().all(|part| span.contains(part)),
            "{parts:?}: {span}"
        );
    }
    assert!(
        spans.len() == 3 && spans[0].contains(&format!("owner={}", guard.owner())),
        "{text}"
    );
    guard.unlock().await.unwrap();
}

/// An event as it was recorded: its level, and each field with its type.
#[derive(Debug, Default)]
struct Told(Vec<(String, String)>);

impl Visit for Told {
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0
            .push((field.name().to_owned(), format!("number {value}")));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.push((field.name().to_owned(), format!("{value:?}")));
    }
}

#[derive(Clone, Default)]
struct Events(Arc<Mutex<Vec<(Level, Told)>>>);

impl<S: Subscriber> Layer<S> for Events {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut told = Told::default();
        event.record(&mut told);
        self.0
            .lock()
            .unwrap()
            .push((*event.metadata().level(), told));
    }
}

impl Events {
    /// Returns the level and the named field of the first event with this message.
    async fn first(&self, message: &str, field: &str) -> (Level, String) {
        let start = Instant::now();
        loop {
            let found = self
                .0
                .lock()
                .unwrap()
                .iter()
                .find_map(|(level, Told(fields))| {
                    let of = |name: &str| {
                        fields
                            .iter()
                            .find(|(field, _)| field == name)
                            .map(|(_, value)| value.clone())
                    };
                    (of("message")? == message).then(|| (*level, of(field).unwrap_or_default()))
                });
            if let Some(found) = found {
                return found;
            }
            assert!(
                start.elapsed() < SOON,
                "{message}: {:?}",
                self.0.lock().unwrap()
            );
            sleep(Duration::from_millis(10)).await;
        }
    }
}

/// A thread of the client logs these events, so the subscriber must be that of the whole process.
#[tokio::test]
#[ignore = "run by `what_has_a_process_of_its_own`"]
async fn events_have_numbers_and_a_shutdown_is_no_warning() {
    let events = Events::default();
    tracing_subscriber::registry().with(events.clone()).init();
    let server = EmbeddedServer::start().unwrap();
    let guard = client(&server, |_| "events")
        .await
        .mutex("l")
        .unwrap()
        .lock()
        .await
        .unwrap();
    guard.unlock().await.unwrap();
    let (level, held) = events.first("hold ended", "held_ms").await;
    assert!(
        level == Level::DEBUG && held.starts_with("number "),
        "{held}"
    );

    events.0.lock().unwrap().clear();
    let ends = client(&server, |_| "events").await;
    let guard = ends.mutex("l").unwrap().lock().await.unwrap();
    ends.shutdown().await.unwrap();
    assert_eq!(
        events.first("hold ended", "end").await,
        (Level::DEBUG, "shut_down".to_owned())
    );
    let warns = |events: &[(Level, Told)]| events.iter().any(|(level, _)| *level <= Level::WARN);
    assert!(
        !warns(&events.0.lock().unwrap()),
        "{:?}",
        events.0.lock().unwrap()
    );
    drop(guard);

    let other = client(&server, |_| "events").await;
    let guard = other.mutex("l").unwrap().lock().await.unwrap();
    other.mutex("l").unwrap().force_unlock().await.unwrap();
    guard.lost().await;
    assert_eq!(
        events.first("lock lost", "holds").await,
        (Level::WARN, "number 1".to_owned())
    );
}

/// A recorder is the user's code, and so is the function that classifies names. If one hangs, no
/// lease is lost.
#[tokio::test]
async fn what_hangs_while_it_counts_loses_no_lease() {
    static HANGS: AtomicBool = AtomicBool::new(false);
    /// Also if this test fails: the threads that hang count for the other tests.
    struct GoesOn;
    impl Drop for GoesOn {
        fn drop(&mut self) {
            HANGS.store(false, Ordering::SeqCst);
        }
    }
    fn hangs(_: &str) -> &'static str {
        while HANGS.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(10));
        }
        "hangs"
    }
    let server = EmbeddedServer::start().unwrap();
    let client = client(&server, hangs).await;
    let guards = [
        client.mutex("a").unwrap().lock().await.unwrap(),
        client.mutex("b").unwrap().lock().await.unwrap(),
    ];
    let goes_on = GoesOn;
    HANGS.store(true, Ordering::SeqCst);
    sleep(3 * LEASE).await;
    assert!(guards.iter().all(|guard| !guard.is_lost()));
    drop(goes_on);
    for guard in guards {
        guard.unlock().await.unwrap();
    }
}

/// Runs these tests in a process each: `classes_are_limited` uses up the classes of its process,
/// and whether a span is enabled is decided once for all threads.
#[test]
fn what_has_a_process_of_its_own() {
    for test in [
        "an_acquire_is_a_span",
        "classes_are_limited",
        "events_have_numbers_and_a_shutdown_is_no_warning",
    ] {
        let output = Command::new(env::current_exe().unwrap())
            .args(["--exact", test, "--ignored"])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            output.status.success() && text.contains("1 passed"),
            "{text}"
        );
    }
}

/// A function that panics, or makes a class of each name, does no harm.
#[tokio::test]
#[ignore = "run by `what_has_a_process_of_its_own`"]
async fn classes_are_limited() {
    fn leaks(lock: &str) -> &'static str {
        assert!(lock != "panics", "the user's function");
        Box::leak(format!("of:{lock}").into_boxed_str())
    }
    let server = EmbeddedServer::start().unwrap();
    let client = client(&server, leaks).await;
    for n in 0..400 {
        client
            .string_lock(format!("{n}"))
            .unwrap()
            .lock()
            .await
            .unwrap()
            .unlock()
            .await
            .unwrap();
    }
    client
        .string_lock("panics")
        .unwrap()
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    let text = RECORDER.render();
    let classes = text
        .lines()
        .filter(|line| line.contains("class=\"of:") && line.contains("_count"))
        .count();
    assert!(classes <= 2 * 256, "{classes}");
    let other = [
        "nestlock_hold_duration_seconds_count",
        "class=\"other\"",
        "kind=\"string\"",
    ];
    assert!(value(&other).unwrap() > 100.0);
}
