//! Transcripts of a real server, in `tests/golden`: the requests and replies of one or several connections, as text.
//! They are replayed against the embedded server, so no other server needs to be installed.
//!
//! ```text
//! # a comment
//! A> SET key "two words" PX 5000      a request on connection A, which is opened if necessary
//! A>~ PTTL key                        integers of the reply need only be close: `+about 5000`
//! A>? CLIENT ID                       integers of the reply are not compared: `+(a number)`
//! A>raw "*1\r\n$x\r\n"                raw bytes
//! A close                             the client closes the connection
//! wait 30                             a pause in milliseconds
//! A< +OK                              what connection A receives, as lines of RESP; lists are indented
//! A< closed                           the server has closed the connection
//! ```
//!
//! `@reentrant/acquire` stands for the text of a script, `@sha:reentrant/acquire` for its SHA1. To add a transcript, write
//! only its requests: `NESTLOCK_RECORD=1 cargo test -p nestlock-embedded --test golden` writes the replies of the real
//! server into all files. Read the diff before you commit it.
#![cfg(unix)]

mod support;

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use nestlock_embedded::EmbeddedServer;
use support::{
    resp::{Value, request, words},
    scripts::{self, Script},
    servers,
    wire::Wire,
};

/// Far beyond what a loaded machine needs.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Numbers {
    Exact,
    Near,
    Any,
}

#[derive(Debug, Clone)]
enum Act {
    Note,
    Request {
        line: char,
        parts: Vec<Vec<u8>>,
        numbers: Numbers,
    },
    Raw {
        line: char,
        bytes: Vec<u8>,
    },
    Close(char),
    Wait(u64),
}

/// A line of the file that acts, with the lines of its replies.
#[derive(Debug, Clone)]
struct Entry {
    text: String,
    act: Act,
    answers: Vec<String>,
}

fn parse(text: &str, scripts: &[Script]) -> Result<Vec<Entry>, String> {
    let mut entries: Vec<Entry> = vec![];
    for (number, text) in text.lines().enumerate() {
        if text.chars().nth(1) == Some('<') {
            let last = entries.last_mut().ok_or("a reply without a request")?;
            last.answers.push(text.into());
            continue;
        }
        let act =
            act(text, scripts).map_err(|error| format!("line {}: {error}: {text}", number + 1))?;
        entries.push(Entry {
            text: text.into(),
            act,
            answers: vec![],
        });
    }
    Ok(entries)
}

fn act(text: &str, scripts: &[Script]) -> Result<Act, String> {
    if text.is_empty() || text.starts_with('#') {
        return Ok(Act::Note);
    }
    if let Some(millis) = text.strip_prefix("wait ") {
        return millis
            .parse()
            .map(Act::Wait)
            .map_err(|error| error.to_string());
    }
    let (how, rest) = text.split_once(' ').ok_or("unknown line")?;
    let mut letters = how.chars();
    let line = letters
        .next()
        .filter(char::is_ascii_uppercase)
        .ok_or("no connection")?;
    let numbers = match letters.as_str() {
        "" if rest == "close" => return Ok(Act::Close(line)),
        ">raw" => {
            return Ok(Act::Raw {
                line,
                bytes: words(rest)?.concat(),
            });
        }
        ">" => Numbers::Exact,
        ">~" => Numbers::Near,
        ">?" => Numbers::Any,
        _ => return Err("unknown line".into()),
    };
    let script = |name: &str| {
        scripts
            .iter()
            .find(|script| script.name == name)
            .ok_or_else(|| format!("there is no lua/{name}.lua"))
    };
    let expand = |word: Vec<u8>| match std::str::from_utf8(&word)
        .ok()
        .and_then(|word| word.strip_prefix('@'))
    {
        None => Ok(word),
        Some(name) => match name.strip_prefix("sha:") {
            Some(name) => Ok(script(name)?.sha().into_bytes()),
            None => Ok(script(name)?.source.clone().into_bytes()),
        },
    };
    let parts = words(rest)?
        .into_iter()
        .map(expand)
        .collect::<Result<_, String>>()?;
    Ok(Act::Request {
        line,
        parts,
        numbers,
    })
}

/// A connection of a transcript.
struct Line {
    wire: Wire,
    id: i64,
    /// It waits for a list, and has not replied to its marker.
    waits: bool,
}

struct Stage<'a> {
    addr: SocketAddr,
    /// Its clock is advanced where a real server would have to wait.
    clock: Option<&'a EmbeddedServer>,
    control: Wire,
    lines: BTreeMap<char, Line>,
    scripts: &'a [Script],
}

impl<'a> Stage<'a> {
    /// Starts with an empty server.
    fn new(addr: SocketAddr, scripts: &'a [Script], clock: Option<&'a EmbeddedServer>) -> Self {
        let mut control = Wire::connect(addr).expect("a connection");
        control.call(&["FLUSHALL"]).expect("a reply");
        control.call(&["SCRIPT", "FLUSH"]).expect("a reply");
        Self {
            addr,
            clock,
            control,
            lines: BTreeMap::new(),
            scripts,
        }
    }

    /// Returns the lines that it causes, of all connections.
    fn play(&mut self, act: &Act) -> Vec<String> {
        let (line, bytes, numbers) = match act {
            Act::Note => return vec![],
            Act::Wait(millis) => {
                let time = Duration::from_millis(*millis);
                match self.clock {
                    Some(server) => server.advance(time),
                    None => std::thread::sleep(time),
                }
                return self.hear_all(None, Numbers::Exact);
            }
            Act::Close(line) => {
                let gone = self.lines.remove(line).expect("an open connection");
                drop(gone.wire);
                self.until(|clients| !clients.contains_key(&gone.id));
                return self.hear_all(None, Numbers::Exact);
            }
            Act::Raw { line, bytes } => (*line, bytes.clone(), Numbers::Exact),
            Act::Request {
                line,
                parts,
                numbers,
            } => (*line, request(parts), *numbers),
        };
        let addr = self.addr;
        let open = self.lines.entry(line).or_insert_with(|| {
            let mut wire = Wire::connect(addr).expect("a connection");
            let Ok(Value::Int(id)) = wire.call(&["CLIENT", "ID"]) else {
                panic!("no id")
            };
            Line {
                wire,
                id,
                waits: false,
            }
        });
        assert!(!open.waits, "{line} is waiting");
        // after QUIT, the server may have closed the connection already
        let _ = open.wire.send_marked(&bytes);
        self.hear_all(Some(line), numbers)
    }

    /// What all connections received: first the one that acted, then the others by name.
    fn hear_all(&mut self, actor: Option<char>, numbers: Numbers) -> Vec<String> {
        let mut heard = actor
            .map(|actor| self.hear(actor, numbers))
            .unwrap_or_default();
        let others: Vec<char> = self
            .lines
            .keys()
            .copied()
            .filter(|name| Some(*name) != actor)
            .collect();
        for name in others {
            let line = self.lines.get_mut(&name).expect("a line");
            if !line.waits {
                let _ = line.wire.send_marked(b"");
            }
            heard.extend(self.hear(name, Numbers::Exact));
        }
        heard
    }

    /// Reads up to its marker, or until it waits.
    fn hear(&mut self, name: char, numbers: Numbers) -> Vec<String> {
        let (start, mut values, mut closed) = (Instant::now(), vec![], false);
        loop {
            let line = self.lines.get_mut(&name).expect("a line");
            line.wire
                .stream()
                .set_read_timeout(Some(Duration::from_millis(5)))
                .expect("a socket");
            let (more, end) = line.wire.read_to_marker();
            values.extend(more);
            match end {
                Ok(()) => {
                    line.waits = false;
                    break;
                }
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                    ) =>
                {
                    let id = line.id;
                    if self
                        .clients()
                        .get(&id)
                        .is_some_and(|flags| flags.contains('b'))
                    {
                        self.lines.get_mut(&name).expect("a line").waits = true;
                        break;
                    }
                }
                Err(_) => {
                    self.lines.remove(&name);
                    closed = true;
                    break;
                }
            }
            assert!(
                start.elapsed() < PATIENCE,
                "{name} does not reply; it has sent {values:?}"
            );
        }
        let mut lines: Vec<String> = values
            .iter()
            .flat_map(|value| masked(value, numbers).lines())
            .map(|text| format!("{name}< {text}"))
            .collect();
        if closed {
            lines.push(format!("{name}< closed"));
        }
        for script in self.scripts {
            let sha = script.sha();
            for line in &mut lines {
                *line = line.replace(&sha, &format!("@sha:{}", script.name));
            }
        }
        lines
    }

    /// The flags of every connection, by its id.
    fn clients(&mut self) -> BTreeMap<i64, String> {
        let list = self.control.call(&["CLIENT", "LIST"]).expect("a reply");
        let list = String::from_utf8_lossy(list.text().expect("a text")).into_owned();
        let field = |line: &str, name: &str| {
            line.split(' ')
                .find_map(|field| field.strip_prefix(name))
                .map(str::to_owned)
        };
        let client = |line: &str| Some((field(line, "id=")?.parse().ok()?, field(line, "flags=")?));
        list.lines().filter_map(client).collect()
    }

    fn until(&mut self, state: impl Fn(&BTreeMap<i64, String>) -> bool) {
        let start = Instant::now();
        while !state(&self.clients()) {
            assert!(
                start.elapsed() < PATIENCE,
                "not in time: {:?}",
                self.clients()
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Masks what differs on each run.
fn masked(value: &Value, numbers: Numbers) -> Value {
    let list = |items: &[Value]| -> Vec<Value> {
        let mut items: Vec<Value> = items.iter().map(|item| masked(item, numbers)).collect();
        // HELLO
        for at in 1..items.len() {
            match items[at - 1].text() {
                Some(b"id") => items[at] = Value::Simple(b"(an id)".to_vec()),
                Some(b"version") => items[at] = Value::Simple(b"(a version)".to_vec()),
                _ => {}
            }
        }
        items
    };
    match value {
        Value::Int(_) if numbers == Numbers::Any => Value::Simple(b"(a number)".to_vec()),
        Value::Int(number) if numbers == Numbers::Near && *number > 0 => {
            // two digits that count
            let unit = 10_i64.pow(number.ilog10().saturating_sub(1));
            Value::Simple(format!("about {}", (number + unit / 2) / unit * unit).into_bytes())
        }
        Value::Bulk(text) if numbers == Numbers::Any && text.iter().all(u8::is_ascii_digit) => {
            Value::Simple(b"(digits)".to_vec())
        }
        Value::List(items) => Value::List(list(items)),
        Value::Map(items) => Value::Map(list(items)),
        Value::Push(items) => Value::Push(list(items)),
        other => other.clone(),
    }
}

/// Plays a transcript and returns it with the replies of this server.
fn replay(
    entries: &[Entry],
    addr: SocketAddr,
    scripts: &[Script],
    clock: Option<&EmbeddedServer>,
) -> Vec<Entry> {
    let mut stage = Stage::new(addr, scripts, clock);
    entries
        .iter()
        .map(|entry| Entry {
            answers: stage.play(&entry.act),
            ..entry.clone()
        })
        .collect()
}

fn same(wanted: &str, got: &str) -> bool {
    let about = |line: &str| line.split_once("+about ")?.1.parse::<i64>().ok();
    match (about(wanted), about(got)) {
        // tolerance for a slow machine
        (Some(wanted), Some(got)) => got <= wanted + wanted / 20 && got >= wanted - wanted / 5,
        _ => wanted == got,
    }
}

/// What differs, with the request before it.
fn compare(wanted: &[Entry], got: &[Entry]) -> Vec<String> {
    let mut wrong = vec![];
    for (wanted, got) in wanted.iter().zip(got) {
        let fits = wanted.answers.len() == got.answers.len()
            && wanted
                .answers
                .iter()
                .zip(&got.answers)
                .all(|(wanted, got)| same(wanted, got));
        if !fits {
            let show = |answers: &[String]| answers.join("\n    ");
            let (wanted_lines, got_lines) = (show(&wanted.answers), show(&got.answers));
            wrong.push(format!(
                "{}\n  real:\n    {wanted_lines}\n  here:\n    {got_lines}",
                wanted.text
            ));
        }
    }
    wrong
}

fn render(entries: &[Entry]) -> String {
    let lines = entries
        .iter()
        .flat_map(|entry| [&entry.text].into_iter().chain(&entry.answers));
    lines.flat_map(|line| [line, "\n"]).collect()
}

fn transcripts(scripts: &[Script]) -> BTreeMap<PathBuf, Vec<Entry>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let paths = fs::read_dir(&folder)
        .expect("tests/golden")
        .map(|entry| entry.expect("an entry").path());
    let transcripts: BTreeMap<_, _> = paths
        .map(|path| {
            let text = fs::read_to_string(&path).expect("a text");
            let entries =
                parse(&text, scripts).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            (path, entries)
        })
        .collect();
    assert!(!transcripts.is_empty());
    transcripts
}

/// All transcripts from which this server deviates.
fn contradictions(
    addr: SocketAddr,
    scripts: &[Script],
    clock: Option<&EmbeddedServer>,
) -> Vec<String> {
    let mut wrong = vec![];
    for (path, wanted) in transcripts(scripts) {
        let differences = compare(&wanted, &replay(&wanted, addr, scripts, clock));
        wrong.extend(
            differences
                .into_iter()
                .map(|text| format!("--- {}\n{text}", path.display())),
        );
    }
    wrong
}

#[test]
fn the_embedded_server_says_what_the_transcripts_say() {
    let (server, scripts) = (EmbeddedServer::start().expect("a server"), scripts::all());
    let wrong = contradictions(server.addr(), &scripts, None);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Advancing the clock has the same effect as waiting.
#[test]
fn the_transcripts_hold_when_the_clock_is_put_forward() {
    let (server, scripts) = (EmbeddedServer::start().expect("a server"), scripts::all());
    let wrong = contradictions(server.addr(), &scripts, Some(&server));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_real_server_says_what_the_transcripts_say() {
    let (server, scripts) = (servers::real(), scripts::all());
    if env::var_os("NESTLOCK_RECORD").is_some() {
        for (path, entries) in transcripts(&scripts) {
            fs::write(
                path,
                render(&replay(&entries, server.addr(), &scripts, None)),
            )
            .expect("a file");
        }
    }
    let wrong = contradictions(server.addr(), &scripts, None);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A change or omission of any reply in any transcript is noticed, and every file is written as it was read.
#[test]
fn a_changed_transcript_is_noticed() {
    let scripts = scripts::all();
    for (path, entries) in transcripts(&scripts) {
        assert_eq!(
            render(&entries),
            fs::read_to_string(&path).expect("a text"),
            "{}",
            path.display()
        );
        for (at, entry) in entries.iter().enumerate() {
            for line in 0..entry.answers.len() {
                let (mut changed, mut shorter) = (entries.clone(), entries.clone());
                changed[at].answers[line].push('x');
                shorter[at].answers.remove(line);
                for wrong in [changed, shorter] {
                    assert_eq!(
                        compare(&entries, &wrong).len(),
                        1,
                        "{}: {}",
                        path.display(),
                        entry.answers[line]
                    );
                }
            }
        }
    }
}

/// The transcripts cover a handshake, every type, and every script of the library.
#[test]
fn the_transcripts_cover_what_they_should() {
    let scripts = scripts::all();
    let texts: Vec<String> = transcripts(&scripts)
        .values()
        .map(|entries| render(entries))
        .collect();
    let all = texts.join("\n");
    for script in &scripts {
        assert!(
            all.contains(&format!("@{} ", script.name)),
            "no transcript runs lua/{}.lua",
            script.name
        );
    }
    let names: BTreeSet<&str> = all
        .lines()
        .filter(|line| line.chars().nth(1) == Some('>'))
        .filter_map(|line| line.split(' ').nth(1))
        .collect();
    for (name, weight) in support::grammar::COMMANDS {
        let invented = ["GETT", "", "\u{fc}ber"].contains(&name);
        assert!(
            invented || names.contains(name),
            "no transcript has {name} ({weight})"
        );
    }
}
