//! Blocking pops: random sequences over several connections serve the same clients, in the same order, on both servers.
#![cfg(unix)]

mod support;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    time::{Duration, Instant},
};

use support::{
    resp::{Value, typed},
    rng::Rng,
    servers::{Both, Pair},
    wire::Wire,
};

/// Far beyond what a loaded machine needs.
const PATIENCE: Duration = Duration::from_secs(20);

const LISTS: [&str; 3] = ["q1", "q2", "q3"];
const WAITERS: usize = 6;

#[derive(Debug, Clone)]
enum Act {
    /// A waiter begins to wait, or gets a reply at once.
    Wait(usize, Vec<String>),
    /// A waiter closes its connection.
    Leave(usize),
    /// The control connection runs a command.
    Do(Vec<String>),
    /// All waits with a timeout end without an element.
    TimeOut,
}

/// One server with its connections.
struct Side {
    addr: SocketAddr,
    control: Wire,
    waiters: Vec<Option<Wire>>,
}

impl Side {
    fn new(addr: SocketAddr) -> Self {
        let mut control = Wire::connect(addr).expect("a connection");
        control.call(&["FLUSHALL"]).expect("a reply");
        Self {
            addr,
            control,
            waiters: (0..WAITERS).map(|_| None).collect(),
        }
    }

    /// The connections that wait, and all that are open.
    fn names(&mut self) -> (BTreeSet<usize>, BTreeSet<usize>) {
        let list = self.control.call(&["CLIENT", "LIST"]).expect("a reply");
        let list = String::from_utf8_lossy(list.text().expect("a text")).into_owned();
        let field = |line: &str, name: &str| {
            line.split(' ')
                .find_map(|field| field.strip_prefix(name))
                .map(str::to_owned)
        };
        let (mut waiting, mut there) = (BTreeSet::new(), BTreeSet::new());
        for line in list.lines() {
            let Some(name) = field(line, "name=w").and_then(|name| name.parse().ok()) else {
                continue;
            };
            there.insert(name);
            if field(line, "flags=").is_some_and(|flags| flags.contains('b')) {
                waiting.insert(name);
            }
        }
        (waiting, there)
    }

    fn until<T>(&mut self, what: &str, mut state: impl FnMut(&mut Self) -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            if let Some(value) = state(self) {
                return value;
            }
            assert!(start.elapsed() < PATIENCE, "{what}: not in time");
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// The reply to the act, with the lists after it; and which waiter got which reply.
    fn act(
        &mut self,
        act: &Act,
        waiting: &mut BTreeSet<usize>,
    ) -> (Vec<Value>, BTreeMap<usize, Value>) {
        let (mut seen, mut answers) = (vec![], BTreeMap::new());
        match act {
            Act::Wait(who, parts) => {
                let addr = self.addr;
                let wire = self.waiters[*who].get_or_insert_with(|| {
                    let mut wire = Wire::connect(addr).expect("a connection");
                    let protocol = if who % 2 == 0 { "2" } else { "3" };
                    wire.call(&["HELLO", protocol, "SETNAME", &format!("w{who}")])
                        .expect("a reply");
                    wire
                });
                wire.send(parts).expect("a connection");
                // either it waits now, or there is a reply to read
                wire.stream()
                    .set_read_timeout(Some(Duration::from_millis(1)))
                    .expect("a socket");
                let value = self.until("a waiter", |side| {
                    match side.waiters[*who].as_mut().expect("a waiter").read() {
                        Ok(value) => Some(Some(value)),
                        Err(_) if side.names().0.contains(who) => Some(None),
                        Err(_) => None,
                    }
                });
                let wire = self.waiters[*who].as_mut().expect("a waiter");
                wire.stream()
                    .set_read_timeout(Some(PATIENCE))
                    .expect("a socket");
                match value {
                    Some(value) => _ = answers.insert(*who, value),
                    None => _ = waiting.insert(*who),
                }
            }
            Act::Leave(who) => {
                self.waiters[*who] = None;
                waiting.remove(who);
                self.until("a goodbye", |side| {
                    (!side.names().1.contains(who)).then_some(())
                });
            }
            Act::Do(parts) => seen.push(self.control.call(parts).expect("a reply")),
            Act::TimeOut => self.until("a timeout", |side| side.names().0.is_empty().then_some(())),
        }
        // a connection that no longer waits has a reply; one that still waits has none
        let still = self.names().0;
        for who in waiting.difference(&still) {
            let value = self.waiters[*who]
                .as_mut()
                .expect("a waiter")
                .read()
                .expect("a reply");
            answers.insert(*who, value);
        }
        *waiting = still;
        seen.extend(LISTS.map(|list| {
            self.control
                .call(&["LRANGE", list, "0", "-1"])
                .expect("a reply")
        }));
        (seen, answers)
    }
}

/// The next act, from the seed and from which connections wait, which is known only while it is played.
fn next(rng: &mut Rng, waiting: &BTreeSet<usize>, last: bool) -> Act {
    let queue = *rng.pick(&LISTS.each_ref());
    let words = |parts: &[&str]| parts.iter().map(ToString::to_string).collect::<Vec<_>>();
    let idle: Vec<usize> = (0..WAITERS).filter(|who| !waiting.contains(who)).collect();
    let value = format!("v{}", rng.below(1000));
    let lua = |text: &str| words(&["EVAL", text, "1", queue, &value]);
    match rng.below(if last { 1 } else { 20 }) {
        0..=8 if !idle.is_empty() => {
            let how = *rng.pick(&[&"BLPOP", &"BLPOP", &"BRPOP"]);
            let mut parts = words(&[how]);
            parts.extend((0..rng.between(1, 3)).map(|_| (*rng.pick(&LISTS.each_ref())).to_owned()));
            parts.push(if last { "0.3" } else { "0" }.into());
            Act::Wait(idle[rng.below(idle.len())], parts)
        }
        9 if !waiting.is_empty() => {
            let all: Vec<usize> = waiting.iter().copied().collect();
            Act::Leave(all[rng.below(all.len())])
        }
        10 => Act::Do(lua(
            "redis.call('rpush', KEYS[1], ARGV[1], 'x') return redis.call('lpop', KEYS[1])",
        )),
        11 => Act::Do(lua(
            "redis.call('rpush', KEYS[1], ARGV[1]) redis.call('del', KEYS[1]) return 1",
        )),
        12 => Act::Do(lua(
            "for _, q in ipairs({'q3', 'q1', 'q2'}) do redis.call('lpush', q, ARGV[1]) end return 1",
        )),
        13 => Act::Do(words(&["SET", queue, &value])),
        14 => Act::Do(words(&["DEL", "q1", "q2", "q3"])),
        15 => Act::Do(words(&["RPUSH", queue, &value, "second", "third"])),
        16 => Act::Do(words(&["LRANGE", queue, "0", "-1"])),
        17 => Act::Do(words(&["LPUSH", queue, "a", "b"])),
        _ => Act::Do(words(&["RPUSH", queue, &value])),
    }
}

/// Plays a round on both servers. Returns the first difference.
fn play(addrs: Both<SocketAddr>, seed: u64, spoil: Option<usize>) -> Result<usize, String> {
    let (mut rng, mut sides) = (Rng::new(seed), addrs.map(Side::new));
    let mut waiting = Both::<BTreeSet<usize>>::default();
    let mut told = vec![];
    let mut served = 0;
    for at in 0..60 {
        let act = match at {
            59 => Act::TimeOut,
            // from here on, every wait has a timeout
            54 => Act::Do(["DEL", "q1", "q2", "q3"].map(String::from).to_vec()),
            55 => {
                for who in waiting.real.clone() {
                    for (side, waiting) in [
                        (&mut sides.real, &mut waiting.real),
                        (&mut sides.ours, &mut waiting.ours),
                    ] {
                        side.act(&Act::Leave(who), waiting);
                    }
                }
                continue;
            }
            at => next(&mut rng, &waiting.real, at > 55),
        };
        told.push(match &act {
            Act::Wait(who, parts) => format!("w{who}> {}", typed(parts)),
            Act::Do(parts) => typed(parts),
            other => format!("{other:?}"),
        });
        if spoil == Some(at) {
            sides.ours.control.call(&["DEL", "q1"]).expect("a reply");
            sides
                .ours
                .control
                .call(&["RPUSH", "q1", "extra"])
                .expect("a reply");
        }
        let real = sides.real.act(&act, &mut waiting.real);
        let ours = sides.ours.act(&act, &mut waiting.ours);
        served += real.1.len();
        if real != ours || waiting.real != waiting.ours {
            let told = told.join("\n  ");
            return Err(format!(
                "seed {seed}, after\n  {told}\n  real: {real:?}, waiting {:?}\n  ours: {ours:?}, waiting {:?}",
                waiting.real, waiting.ours
            ));
        }
    }
    Ok(served)
}

#[test]
fn blocked_clients_are_served_as_by_redis() {
    let part = |first: u64| {
        let pair = Pair::start();
        (first..first + 15)
            .map(|seed| play(pair.addrs(), seed, None))
            .collect::<Vec<_>>()
    };
    let results: Vec<_> = std::thread::scope(|scope| {
        // most of the time is waiting
        let parts = [0, 15, 30, 45].map(|first| scope.spawn(move || part(first)));
        parts
            .into_iter()
            .flat_map(|part| part.join().expect("no panic"))
            .collect()
    });
    let wrong: Vec<&String> = results
        .iter()
        .filter_map(|result| result.as_ref().err())
        .take(3)
        .collect();
    assert!(
        wrong.is_empty(),
        "{}",
        wrong
            .iter()
            .map(|text| text.as_str())
            .collect::<Vec<_>>()
            .join("\n\n")
    );
    let served: usize = results.into_iter().flatten().sum();
    assert!(served > 1000, "only {served} were served");
}

#[test]
fn a_push_to_one_server_only_is_noticed() {
    let pair = Pair::start();
    let noticed = (0..5)
        .filter(|seed| play(pair.addrs(), *seed, Some(30)).is_err())
        .count();
    assert_eq!(noticed, 5);
}

/// The order of the BLPOPs counts, not the order of connecting; a new wait is a new place in the queue.
#[test]
fn fifty_waiters_are_served_in_the_order_in_which_they_came() {
    let pair = Pair::start();
    let order = pair.addrs().map(|addr| {
        let mut control = Wire::connect(addr).expect("a connection");
        let mut wires: Vec<Wire> = (0..50)
            .map(|_| Wire::connect(addr).expect("a connection"))
            .collect();
        let mut order: Vec<usize> = (0..50).collect();
        Rng::new(7).shuffle(&mut order);
        let waits = |control: &mut Wire, count: usize| {
            let start = Instant::now();
            loop {
                let list = control.call(&["CLIENT", "LIST"]).expect("a reply");
                let list = String::from_utf8_lossy(list.text().expect("a text")).into_owned();
                if list
                    .lines()
                    .filter(|line| line.contains(" flags=b"))
                    .count()
                    == count
                {
                    return;
                }
                assert!(start.elapsed() < PATIENCE, "{count} should wait:\n{list}");
            }
        };
        for (place, who) in order.iter().enumerate() {
            wires[*who]
                .send(&["BLPOP", "q", "0"])
                .expect("a connection");
            waits(&mut control, place + 1);
        }
        let mut got = vec![];
        // one by one, several at once, from a script
        for n in 0..20 {
            control
                .call(&["RPUSH", "q", &n.to_string()])
                .expect("a reply");
        }
        let many: Vec<String> = ["RPUSH", "q"]
            .into_iter()
            .map(String::from)
            .chain((20..35).map(|n| n.to_string()))
            .collect();
        control.call(&many).expect("a reply");
        let script = "for n = 35, 49 do redis.call('rpush', 'q', n) end return 1";
        control.call(&["EVAL", script, "0"]).expect("a reply");
        for who in &order {
            got.push(wires[*who].read().expect("a reply"));
        }
        assert_eq!(
            control.call(&["EXISTS", "q"]).expect("a reply"),
            Value::Int(0)
        );
        got
    });
    assert_eq!(order.real, order.ours);
    let expected: Vec<Value> = (0..50)
        .map(|n| {
            Value::List(vec![
                Value::Bulk(b"q".to_vec()),
                Value::Bulk(n.to_string().into_bytes()),
            ])
        })
        .collect();
    assert_eq!(order.ours, expected);
}
