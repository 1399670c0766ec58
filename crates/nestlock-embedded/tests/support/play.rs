//! Sends the same steps to both servers and finds the first difference in their replies.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::{self, Write as _},
    io,
    net::SocketAddr,
    time::{Duration, Instant, SystemTime},
};

use super::{
    resp::{Value, request, typed},
    servers::Both,
    wire::Wire,
};

/// How the replies of the two servers are compared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Check {
    /// Byte for byte.
    Exact,
    /// Milliseconds from now: the two servers got the command at different moments.
    Millis,
    /// The same in seconds.
    Seconds,
    /// In any order.
    Unordered,
    /// Fields and values, in any order of the fields.
    Pairs,
    /// The same kind of reply, with any numbers and texts.
    Kind,
    /// The reply to HELLO: the connection's id and the server's version may differ.
    Hello,
    /// A list, each of its items compared in its own way.
    Each(Vec<Check>),
}

#[derive(Debug, Clone)]
pub struct Command {
    pub parts: Vec<Vec<u8>>,
    pub check: Check,
    /// The label for statistics; the command's name if empty.
    pub label: String,
}

impl Command {
    pub fn new<P: AsRef<[u8]>>(parts: &[P], check: Check) -> Self {
        Self::of(
            parts.iter().map(|part| part.as_ref().to_vec()).collect(),
            check,
        )
    }

    pub fn of(parts: Vec<Vec<u8>>, check: Check) -> Self {
        Self {
            parts,
            check,
            label: String::new(),
        }
    }

    pub fn name(&self) -> String {
        String::from_utf8_lossy(&self.parts[0]).to_ascii_uppercase()
    }
}

/// A connection of a round.
#[derive(Debug, Clone, Copy)]
pub struct Line {
    /// 2 or 3.
    pub protocol: u8,
    /// It subscribes: replies and messages are compared as one stream.
    pub listens: bool,
}

/// Both protocols, for sending and for listening.
pub const LINES: &[Line] = &[
    Line {
        protocol: 2,
        listens: false,
    },
    Line {
        protocol: 3,
        listens: false,
    },
    Line {
        protocol: 2,
        listens: true,
    },
    Line {
        protocol: 3,
        listens: true,
    },
];

/// The rules for all rounds of a test.
#[derive(Debug, Clone)]
pub struct Rules {
    pub lines: &'static [Line],
    /// Keys with fields in any order: they are too big for Redis to keep the order of insertion.
    pub loose: &'static [&'static str],
    /// How the contents of hashes and sorted sets are compared.
    pub content: Check,
}

#[derive(Debug, Clone)]
pub enum Step {
    /// A command on a connection. Consecutive commands on the same connection are pipelined.
    Send(usize, Command),
    /// Compare every key, and what the connections received.
    State,
    /// Compare the results of a whole iteration with these options.
    Scan(Vec<Vec<u8>>),
    /// Wait this many milliseconds.
    Wait(u64),
    /// A command that only `ours` gets: the test must notice it.
    Perturb(Command),
}

impl fmt::Display for Step {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Send(line, command) => {
                write!(out, "{line}> {}", squeezed(&typed(&command.parts)))
            }
            Self::State => out.write_str("compare the state"),
            Self::Scan(options) => write!(out, "compare SCAN {}", typed(options)),
            Self::Wait(millis) => write!(out, "wait {millis} ms"),
            Self::Perturb(command) => write!(out, "ours only: {}", typed(&command.parts)),
        }
    }
}

#[derive(Debug, Clone)]
pub struct Difference {
    /// The step that showed it.
    pub at: usize,
    pub what: String,
    pub real: String,
    pub ours: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            out,
            "{}\n  real: {}\n  ours: {}",
            squeezed(&self.what),
            squeezed(&self.real),
            squeezed(&self.ours)
        )
    }
}

/// Shortens long runs of one letter, and the whole text.
fn squeezed(text: &str) -> String {
    let (mut short, mut letters) = (String::new(), text.chars().peekable());
    while let Some(letter) = letters.next() {
        let mut count = 1;
        while letters.next_if_eq(&letter).is_some() {
            count += 1;
        }
        if count > 30 {
            let _ = write!(short, "{letter}<{count} times>");
        } else {
            short.extend(std::iter::repeat_n(letter, count));
        }
    }
    short.chars().take(4000).collect()
}

/// For each command name.
pub type Tally = BTreeMap<String, Count>;

#[derive(Debug, Default, Clone)]
pub struct Count {
    pub accepted: usize,
    pub refused: usize,
    /// `nil`, `list`, `text`, and integers up to 1; greater ones are `>1`. Items of lists count as well.
    pub kinds: BTreeSet<String>,
}

impl Count {
    pub fn total(&self) -> usize {
        self.accepted + self.refused
    }

    pub fn add(&mut self, other: Self) {
        self.accepted += other.accepted;
        self.refused += other.refused;
        self.kinds.extend(other.kinds);
    }

    fn see(&mut self, answer: &Value) {
        if answer.is_error() {
            self.refused += 1;
            return;
        }
        self.accepted += 1;
        for value in answer.items().unwrap_or_default().iter().chain([answer]) {
            self.kinds.insert(match value {
                Value::NilBulk | Value::NilList | Value::Null => "nil".into(),
                Value::Int(number) if *number > 1 => ">1".into(),
                Value::Int(number) => number.to_string(),
                value if value.items().is_some() => "list".into(),
                _ => "text".into(),
            });
        }
    }
}

/// An accepted difference of error texts: a part of Redis's text that ours lacks.
type Allowed = (&'static str, &'static str);

/// The error code, the first word, is always compared.
const ALLOWED: [Allowed; 1] = [
    // a script that ends with `return setmetatable(_G, ...)`: a tail call loses its line number
    (
        "Attempt to modify a readonly table script: 6272db8503d65d1a388d09238bbfa63398419ac5",
        ", on @user_script:1.",
    ),
];

/// Half of the distance that grammars keep between two times.
const SLACK_MILLIS: i64 = 15_000;

/// Times from here on are absolute, and must be equal.
pub const FIXED_TIMES: i64 = 4_000_000_000_000;

pub struct Play {
    lines: Vec<(Line, Both<Wire>)>,
    control: Both<Wire>,
    loose: &'static [&'static str],
    content: Check,
    pub tally: Tally,
    /// If set, collects replies that differ and continues until the keys differ too.
    pub survey: Option<Vec<Difference>>,
}

impl Play {
    /// Empties both servers and connects.
    pub fn new(addrs: Both<SocketAddr>, rules: &Rules) -> io::Result<Self> {
        let mut control = both(addrs, Wire::connect)?;
        for wire in [&mut control.real, &mut control.ours] {
            // the reply means that all is done; then wait until the connections of the last round are gone
            wire.call(&["FLUSHALL"])?;
            wire.call(&["SCRIPT", "FLUSH"])?;
            let start = Instant::now();
            while wire.call(&["PUBSUB", "CHANNELS"])? != Value::List(vec![])
                || wire.call(&["PUBSUB", "SHARDCHANNELS"])? != Value::List(vec![])
                || wire.call(&["PUBSUB", "NUMPAT"])? != Value::Int(0)
            {
                if start.elapsed() > Duration::from_secs(10) {
                    return Err(io::Error::other(
                        "subscriptions of closed connections remain",
                    ));
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let connect = |line: &Line| {
            let wires = both(addrs, |addr| {
                let mut wire = Wire::connect(addr)?;
                wire.call(&["HELLO", &line.protocol.to_string()])?;
                Ok(wire)
            })?;
            Ok((*line, wires))
        };
        let lines = rules.lines.iter().map(connect).collect::<io::Result<_>>()?;
        let content = rules.content.clone();
        Ok(Self {
            lines,
            control,
            loose: rules.loose,
            content,
            tally: Tally::new(),
            survey: None,
        })
    }

    /// Runs the steps up to the first difference.
    pub fn run(&mut self, steps: &[Step]) -> Option<Difference> {
        let mut at = 0;
        while at < steps.len() {
            let result = match &steps[at] {
                Step::Send(line, _) => {
                    let (first, mut bytes, mut commands) = (at, 0, Vec::new());
                    // more would fill the sockets, as the test does not read meanwhile
                    while let Some(Step::Send(same, command)) = steps.get(at)
                        && same == line
                        && bytes < 65536
                    {
                        bytes += command
                            .parts
                            .iter()
                            .map(|part| part.len() + 16)
                            .sum::<usize>();
                        commands.push(command);
                        at += 1;
                    }
                    at -= 1;
                    self.pipeline(*line, first, &commands)
                }
                Step::State => self.state(at),
                Step::Scan(options) => self.scan(at, options),
                Step::Wait(millis) => {
                    let until = SystemTime::now() + Duration::from_millis(*millis);
                    while let Ok(left) = until.duration_since(SystemTime::now()) {
                        std::thread::sleep(left);
                    }
                    Ok(())
                }
                Step::Perturb(command) => {
                    let answer = self.control.ours.call(&command.parts).expect("a reply");
                    assert!(!answer.is_error(), "{answer:?}");
                    Ok(())
                }
            };
            if let Err(difference) = result {
                return Some(*difference);
            }
            at += 1;
        }
        None
    }

    fn pipeline(
        &mut self,
        line: usize,
        first: usize,
        commands: &[&Command],
    ) -> Result<(), Box<Difference>> {
        let bytes: Vec<u8> = commands
            .iter()
            .flat_map(|command| request(&command.parts))
            .collect();
        let (kind, wires) = &mut self.lines[line];
        let said = exchange(wires, &bytes);
        let differ = |at: usize, what: String, said: Both<String>| {
            Err(Box::new(Difference {
                at: first + at,
                what,
                real: said.real,
                ours: said.ours,
            }))
        };
        let last = commands.len().saturating_sub(1);
        if kind.listens {
            for command in commands {
                self.tally.entry(command.name()).or_default().accepted += 1;
            }
            let heard = said.clone().map(|(values, _)| sorted_messages(&values));
            return match first_difference(&heard) {
                None if said.real.1.is_none() && said.ours.1.is_none() => Ok(()),
                None => differ(
                    last,
                    format!("line {line} broke"),
                    said.map(|(_, end)| format!("{end:?}")),
                ),
                Some(said) => differ(last, format!("line {line}, replies and messages"), said),
            };
        }
        let split = said.map(|(values, end)| {
            let (messages, mut replies): (Vec<_>, Vec<_>) = values
                .into_iter()
                .partition(|value| matches!(value, Value::Push(_)));
            // the end of a connection, or a missing reply, is compared as well
            replies.extend(
                end.map(|error| Value::Simple(format!("(connection ended: {error})").into_bytes())),
            );
            (messages, replies)
        });
        let missing = Value::Simple(b"(nothing)".to_vec());
        for (index, command) in commands.iter().enumerate() {
            let reply = |replies: &Vec<Value>| replies.get(index).unwrap_or(&missing).clone();
            let (real, ours) = (reply(&split.real.1), reply(&split.ours.1));
            let label = if command.label.is_empty() {
                command.name()
            } else {
                command.label.clone()
            };
            self.tally.entry(label).or_default().see(&real);
            if !agree(&command.name(), &command.check, &real, &ours) {
                let what = format!("line {line} ({}): {}", kind.protocol, typed(&command.parts));
                let said = Both {
                    real: format!("{real:?}"),
                    ours: format!("{ours:?}"),
                };
                match &mut self.survey {
                    Some(found) => found.push(Difference {
                        at: first,
                        what,
                        real: said.real,
                        ours: said.ours,
                    }),
                    None => return differ(index, what, said),
                }
            }
        }
        let extra = split
            .clone()
            .map(|(_, replies)| replies.into_iter().skip(commands.len()).collect());
        if let Some(said) = first_difference(&extra) {
            return differ(
                last,
                format!("line {line}: more replies than commands, or a broken line"),
                said,
            );
        }
        match first_difference(&split.map(|(messages, _)| messages)) {
            Some(said) => differ(last, format!("line {line}: messages"), said),
            None => Ok(()),
        }
    }

    fn state(&mut self, at: usize) -> Result<(), Box<Difference>> {
        for line in 0..self.lines.len() {
            self.pipeline(line, at, &[])?;
        }
        // 0 last: the control connection must end there
        for db in ["1", "0"] {
            self.ask(at, &[Command::new(&["SELECT", db], Check::Exact)])?;
            let keys = self.ask(at, &[Command::new(&["KEYS", "*"], Check::Unordered)])?;
            let keys: BTreeSet<Vec<u8>> = keys[0]
                .items()
                .unwrap_or_default()
                .iter()
                .filter_map(Value::text)
                .map(<[u8]>::to_vec)
                .collect();
            let mut about = Vec::new();
            for key in &keys {
                about.push(Command::new(&[b"TYPE", &**key], Check::Exact));
                about.push(Command::new(&[b"PEXPIRETIME", &**key], Check::Millis));
            }
            let about = self.ask(at, &about)?;
            let contents: Vec<Command> = keys
                .iter()
                .zip(about.chunks(2))
                .map(|(key, about)| self.content(key, &about[0]))
                .collect();
            self.ask(at, &contents)?;
        }
        Ok(())
    }

    fn content(&self, key: &[u8], kind: &Value) -> Command {
        let loose = self.loose.iter().any(|loose| loose.as_bytes() == key);
        match kind.text().unwrap_or_default() {
            b"hash" => Command::new(
                &[b"HGETALL", key],
                if loose {
                    Check::Pairs
                } else {
                    self.content.clone()
                },
            ),
            b"list" => Command::new(&[b"LRANGE", key, b"0", b"-1"], Check::Exact),
            b"zset" => Command::new(
                &[b"ZRANGE", key, b"0", b"-1", b"WITHSCORES"],
                self.content.clone(),
            ),
            b"none" => Command::new(&[b"EXISTS", key], Check::Exact),
            _ => Command::new(&[b"GET", key], Check::Exact),
        }
    }

    /// Queries both over connections that no step uses. Returns the real server's replies.
    fn ask(&mut self, at: usize, questions: &[Command]) -> Result<Vec<Value>, Box<Difference>> {
        let mut answers = Vec::new();
        for questions in questions.chunks(200) {
            let bytes: Vec<u8> = questions
                .iter()
                .flat_map(|question| request(&question.parts))
                .collect();
            let said = exchange(&mut self.control, &bytes);
            for (index, question) in questions.iter().enumerate() {
                let (real, ours) = (said.real.0.get(index), said.ours.0.get(index));
                let same = match (real, ours) {
                    (Some(real), Some(ours)) => {
                        agree(&question.name(), &question.check, real, ours)
                    }
                    _ => false,
                };
                if !same {
                    return Err(Box::new(Difference {
                        at,
                        what: format!("state: {}", typed(&question.parts)),
                        real: format!("{real:?}"),
                        ours: format!("{ours:?}"),
                    }));
                }
            }
            answers.extend(said.real.0);
        }
        Ok(answers)
    }

    fn scan(&mut self, at: usize, options: &[Vec<u8>]) -> Result<(), Box<Difference>> {
        let whole = |wire: &mut Wire| -> Result<BTreeSet<Vec<u8>>, String> {
            let (mut found, mut cursor) = (BTreeSet::new(), b"0".to_vec());
            for _ in 0..100_000 {
                let mut parts = vec![b"SCAN".to_vec(), cursor.clone()];
                parts.extend(options.iter().cloned());
                let reply = wire.call(&parts).map_err(|error| error.to_string())?;
                let Value::List(pair) = &reply else {
                    return Err(format!("{reply:?}"));
                };
                let [Value::Bulk(next), Value::List(keys)] = &pair[..] else {
                    return Err(format!("{reply:?}"));
                };
                found.extend(keys.iter().filter_map(Value::text).map(<[u8]>::to_vec));
                if next == b"0" {
                    return Ok(found);
                }
                cursor.clone_from(next);
            }
            Err("never ends".into())
        };
        let found = self.control.as_mut().map(whole);
        if found.real == found.ours {
            return Ok(());
        }
        let show = |found: Result<BTreeSet<Vec<u8>>, String>| {
            found.map(|keys| typed(&Vec::from_iter(keys)))
        };
        let found = found.map(show).map(|found| format!("{found:?}"));
        let what = format!("all of SCAN {}", typed(options));
        Err(Box::new(Difference {
            at,
            what,
            real: found.real,
            ours: found.ours,
        }))
    }

    /// Unsubscribes from everything, so that the next round need not wait.
    pub fn end(mut self) {
        for (line, wires) in &mut self.lines {
            if line.listens {
                let bytes = ["UNSUBSCRIBE", "PUNSUBSCRIBE", "SUNSUBSCRIBE"]
                    .map(|name| request(&[name]))
                    .concat();
                exchange(wires, &bytes);
            }
        }
    }
}

fn both<T>(
    addrs: Both<SocketAddr>,
    connect: impl Fn(SocketAddr) -> io::Result<T>,
) -> io::Result<Both<T>> {
    Ok(Both {
        real: connect(addrs.real)?,
        ours: connect(addrs.ours)?,
    })
}

/// What was read, and how the connection ended if it did.
type Said = (Vec<Value>, Option<String>);

/// Both servers execute it at the same time.
fn exchange(wires: &mut Both<Wire>, bytes: &[u8]) -> Both<Said> {
    let sent = wires.as_mut().map(|wire| wire.send_marked(bytes));
    let read = |wire: &mut Wire, sent: io::Result<()>| {
        let (values, end) = wire.read_to_marker();
        (values, end.and(sent).err().map(|error| error.to_string()))
    };
    Both {
        real: read(&mut wires.real, sent.real),
        ours: read(&mut wires.ours, sent.ours),
    }
}

/// The first item that differs, with the one before it.
fn first_difference(said: &Both<Vec<Value>>) -> Option<Both<String>> {
    let longest = said.real.len().max(said.ours.len());
    let at = (0..longest).find(|at| said.real.get(*at) != said.ours.get(*at))?;
    let show = |values: &Vec<Value>| {
        let around = &values[at.saturating_sub(1).min(values.len())..(at + 2).min(values.len())];
        format!("{} values, near the {at}th {around:?}", values.len())
    };
    Some(Both {
        real: show(&said.real),
        ours: show(&said.ours),
    })
}

/// Sorts messages whose order is random in Redis, which iterates a table with a secret seed: patterns that match one
/// message, and channels that are unsubscribed together.
fn sorted_messages(values: &[Value]) -> Vec<Value> {
    fn run(value: &Value) -> Option<(Vec<u8>, Option<[&Value; 2]>)> {
        let (Value::List(items) | Value::Push(items)) = value else {
            return None;
        };
        let kind = items.first()?.text()?;
        match (kind, items.len()) {
            (b"pmessage", 4) => Some((kind.to_vec(), Some([&items[2], &items[3]]))),
            (b"unsubscribe" | b"punsubscribe" | b"sunsubscribe", 3) => Some((kind.to_vec(), None)),
            _ => None,
        }
    }
    let mut sorted: Vec<Value> = Vec::new();
    let mut from = 0;
    while from < values.len() {
        let same = run(&values[from]);
        let mut to = from + 1;
        while same.is_some() && to < values.len() && run(&values[to]) == same {
            to += 1;
        }
        let mut names: Vec<Value> = values[from..to]
            .iter()
            .filter_map(|value| Some(value.items()?.get(1)?.clone()))
            .collect();
        names.sort();
        for (index, value) in values[from..to].iter().enumerate() {
            let mut value = value.clone();
            if let (true, Value::List(items) | Value::Push(items)) = (same.is_some(), &mut value) {
                items[1] = names[index].clone();
            }
            sorted.push(value);
        }
        from = to;
    }
    sorted
}

fn agree(name: &str, check: &Check, real: &Value, ours: &Value) -> bool {
    if real == ours {
        return true;
    }
    if let (Value::Error(real_text), Value::Error(our_text)) = (real, ours) {
        let (real_text, our_text) = (
            String::from_utf8_lossy(real_text),
            String::from_utf8_lossy(our_text),
        );
        let allowed = |(text, more): &Allowed| {
            real_text.contains(text) && real_text.replace(more, "") == our_text
        };
        return real.code() == ours.code() && ALLOWED.iter().any(allowed);
    }
    if real.is_error() || ours.is_error() {
        return false;
    }
    let same_kind = std::mem::discriminant(real) == std::mem::discriminant(ours);
    match check {
        Check::Exact => match (real.items(), ours.items()) {
            // errors inside lists
            (Some(real), Some(ours)) if same_kind => each(name, check, real, ours),
            _ => false,
        },
        Check::Millis => near(name, check, real, ours, 50_000, SLACK_MILLIS),
        Check::Seconds => near(name, check, real, ours, 900, SLACK_MILLIS / 1000),
        Check::Unordered | Check::Pairs => match (real.items(), ours.items()) {
            (Some(real), Some(ours)) if same_kind && real.len() == ours.len() => {
                let size = if *check == Check::Pairs { 2 } else { 1 };
                // the cursor of SCAN stands before its list
                if real.len() == 2 && size == 1 && real[1].items().is_some() {
                    return real[0] == ours[0] && agree(name, check, &real[1], &ours[1]);
                }
                let sorted = |items: &[Value]| {
                    let mut items: Vec<Vec<Value>> =
                        items.chunks(size).map(<[Value]>::to_vec).collect();
                    items.sort();
                    items
                };
                sorted(real) == sorted(ours)
            }
            _ => false,
        },
        Check::Kind => match (real.items(), ours.items()) {
            (Some(real), Some(ours)) if same_kind => each(name, check, real, ours),
            _ => same_kind,
        },
        Check::Hello => {
            let masked = |value: &Value| {
                let mut items = value.items().unwrap_or_default().to_vec();
                let own = [&b"id"[..], b"version"];
                for at in 1..items.len() {
                    if items[at - 1].text().is_some_and(|text| own.contains(&text)) {
                        items[at] = Value::Null;
                    }
                }
                items
            };
            same_kind && masked(real) == masked(ours)
        }
        Check::Each(checks) => match (real.items(), ours.items()) {
            (Some(real), Some(ours)) if same_kind && real.len() == ours.len() => {
                let check = |at: usize| checks.get(at).unwrap_or(&Check::Exact);
                real.iter()
                    .zip(ours)
                    .enumerate()
                    .all(|(at, (real, ours))| agree(name, check(at), real, ours))
            }
            _ => false,
        },
    }
}

fn each(name: &str, check: &Check, real: &[Value], ours: &[Value]) -> bool {
    real.len() == ours.len()
        && real
            .iter()
            .zip(ours)
            .all(|(real, ours)| agree(name, check, real, ours))
}

/// Numbers from `low` on may differ by `slack`, on their own and in lists.
fn near(name: &str, check: &Check, real: &Value, ours: &Value, low: i64, slack: i64) -> bool {
    /// Returns the integer part, and the fraction, which is not a time but a turn.
    fn number(value: &Value) -> Option<(i64, &str)> {
        match value {
            Value::Int(number) => Some((*number, "")),
            // scores and fields that are times
            Value::Bulk(text) | Value::Double(text) => {
                let text = std::str::from_utf8(text).ok()?;
                let (whole, turn) = text.split_once('.').unwrap_or((text, ""));
                Some((whole.parse().ok()?, turn))
            }
            _ => None,
        }
    }
    if std::mem::discriminant(real) != std::mem::discriminant(ours) {
        return false;
    }
    match (real.items(), ours.items(), number(real), number(ours)) {
        (Some(real), Some(ours), ..) => each(name, check, real, ours),
        (.., Some((real, real_turn)), Some((ours, our_turn))) => {
            let unit = if *check == Check::Seconds { 1000 } else { 1 };
            let fixed = name.ends_with("EXPIRETIME") && real >= FIXED_TIMES / unit;
            !fixed
                && real >= low
                && ours >= low
                && real.abs_diff(ours) <= slack.unsigned_abs()
                && real_turn == our_turn
        }
        _ => false,
    }
}
