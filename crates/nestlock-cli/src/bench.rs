//! `bench`: what a lock costs here, beside bare EVALSHA over the same sort of connection in the same rounds.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use nestlock::LockClient;

use crate::{
    Failure,
    args::{Bench, Server, Unusable},
    raw::{Raw, text},
    say, warn,
};

/// No figure from fewer.
const FEWEST: usize = 1_000;
/// What bare EVALSHA is measured with: two requests for a pair, as a lock and an unlock.
const BARE: &str = "return redis.call('hset', KEYS[1], 'f', ARGV[1])";
/// A bar of a ratio of one.
const BAR: u32 = 40;

/// What one round took: pairs, each with its time.
type Times = Vec<Duration>;

pub(crate) async fn bench(server: &Server, bench: &Bench) -> Result<u8, Failure> {
    let (tasks, rounds) = (usize::from(bench.tasks), usize::from(bench.rounds));
    let each = bench.pairs.max(FEWEST).div_ceil(tasks * rounds);
    let raw = Raw::connect(server).await?;
    let url = server.url()?;
    let commands = 4 * each * tasks * rounds;
    let others = others(&raw).await;
    let is_near = ["127.0.0.1", "localhost", "[::1]", "redis+unix"].iter().any(|near| url.contains(near));
    if !bench.yes && (!is_near || others > 0) {
        let why =
            if is_near { format!("{others} other clients use it") } else { "it is not on this machine".to_owned() };
        return Err(
            Unusable(format!("this sends about {commands} commands to the server, and {why}; say --yes")).into()
        );
    }
    warn(format_args!("about {commands} commands, {} tasks at a time, {} rounds", bench.tasks, bench.rounds));
    let client = server.connect(None).await?;
    let scratch =
        format!("nestlock-bench:{}", client.current_owner().to_string().split(':').next().unwrap_or_default());
    let measured = tokio::select! {
        measured = measure(&raw, &client, server, &scratch, bench, each) => measured,
        _ = tokio::signal::ctrl_c() => Err("interrupted".into()),
    };
    client.idle().await;
    let key = format!("{}{scratch}:bare", server.prefix);
    let _ = raw.ask(&["DEL", &key]).await;
    let (bare, locks) = measured?;
    report("bare EVALSHA, twice", &bare, &bare);
    report("lock and unlock", &locks, &bare);
    Ok(0)
}

async fn others(raw: &Raw) -> usize {
    let list = raw.ask(&["CLIENT", "LIST"]).await.ok().and_then(|list| text(&list)).unwrap_or_default();
    // this one
    list.lines().count().saturating_sub(1)
}

fn count(pairs: usize) -> f64 {
    f64::from(u32::try_from(pairs).unwrap_or(u32::MAX))
}

/// Pairs a second of each round, and the time of each pair.
struct Measured {
    rates: Vec<f64>,
    times: Times,
}

impl Measured {
    fn rate(&self) -> f64 {
        let mut rates = self.rates.clone();
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    }
}

async fn measure(
    raw: &Raw,
    client: &LockClient,
    server: &Server,
    scratch: &str,
    bench: &Bench,
    each: usize,
) -> Result<(Measured, Measured), Failure> {
    let loaded = raw.ask(&["SCRIPT", "LOAD", BARE]).await.map_err(|error| error.details().to_owned())?;
    let (digest, key) = (text(&loaded).unwrap_or_default(), format!("{}{scratch}:bare", server.prefix));
    let mut bare = Measured { rates: Vec::new(), times: Vec::new() };
    let mut locks = Measured { rates: Vec::new(), times: Vec::new() };
    let tasks = usize::from(bench.tasks);
    for _ in 0..bench.rounds {
        round(&mut bare, tasks, |_| async {
            let mut times = Vec::with_capacity(each);
            for _ in 0..each {
                let began = Instant::now();
                for _ in 0..2 {
                    let asked = raw.ask(&["EVALSHA", &digest, "1", &key, "1"]).await;
                    asked.map_err(|error| error.details().to_owned())?;
                }
                times.push(began.elapsed());
            }
            Ok(times)
        })
        .await?;
        round(&mut locks, tasks, |task| async move {
            let lock = client.mutex(format!("{scratch}:{task}"))?;
            let mut times = Vec::with_capacity(each);
            for _ in 0..each {
                let began = Instant::now();
                lock.lock().await?.unlock().await?;
                times.push(began.elapsed());
            }
            Ok(times)
        })
        .await?;
    }
    Ok((bare, locks))
}

async fn round<F: Future<Output = Result<Times, Failure>>>(
    measured: &mut Measured,
    tasks: usize,
    work: impl Fn(usize) -> F,
) -> Result<(), Failure> {
    let began = Instant::now();
    let all: Result<Vec<Times>, Failure> = join_all((0..tasks).map(work)).await.into_iter().collect();
    let (all, took) = (all?.concat(), began.elapsed());
    measured.rates.push(count(all.len()) / took.as_secs_f64());
    measured.times.extend(all);
    Ok(())
}

/// The ratio first: what is absolute is this machine's.
fn report(what: &str, measured: &Measured, bare: &Measured) {
    let ratio = measured.rate() / bare.rate();
    let mut times = measured.times.clone();
    times.sort_unstable();
    let at = |share: usize| times[(times.len() - 1) * share / 100].as_secs_f64() * 1e3;
    let bar: String = (0..2 * BAR).take_while(|mark| f64::from(*mark) < ratio * f64::from(BAR)).map(|_| '#').collect();
    say(format_args!("{what:20} {ratio:5.2} x  {bar}"));
    say(format_args!(
        "{:20} {:.0} pairs/s; p50 {:.3} ms, p99 {:.3} ms, max {:.3} ms; {} pairs",
        "",
        measured.rate(),
        at(50),
        at(99),
        at(100),
        times.len()
    ));
}
