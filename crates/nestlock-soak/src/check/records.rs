//! The histories, as values.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    io::{BufRead, BufReader},
    path::Path,
};

use super::{
    op::{Client, Op, Outcome},
    weather::{Event, Weather},
};
use crate::{
    clock::MILLI,
    history::JOURNAL,
    kinds::{Class, Kind},
    settings::{Mode, Settings},
};

/// A guarded write.
#[derive(Debug, Clone)]
pub(crate) struct Write {
    pub(crate) id: String,
    pub(crate) key: String,
    pub(crate) token: u64,
    pub(crate) begin: u64,
    pub(crate) end: u64,
    pub(crate) result: String,
}

/// The release of a hold that was left to its lease.
#[derive(Debug, Clone)]
pub(crate) struct Taken {
    /// The operation that left it.
    pub(crate) what: String,
    pub(crate) task: String,
    pub(crate) begin: u64,
    pub(crate) end: Option<(u64, String)>,
}

#[derive(Debug)]
pub(crate) struct Records {
    pub(crate) mode: Mode,
    pub(crate) ops: Vec<Op>,
    pub(crate) writes: Vec<Write>,
    pub(crate) taken: Vec<Taken>,
    pub(crate) clients: HashMap<String, Client>,
    pub(crate) weather: Weather,
    /// When the calm began.
    pub(crate) calm: u64,
}

impl Records {
    pub(crate) fn read(folder: &Path) -> Result<Self, String> {
        let text = |error: std::io::Error| error.to_string();
        let mut files = Vec::new();
        for entry in fs::read_dir(folder).map_err(text)? {
            let path = entry.map_err(text)?.path();
            if let Some(name) = path
                .file_name()
                .and_then(|name| name.to_str()?.strip_suffix(".history"))
            {
                files.push((
                    name.to_owned(),
                    BufReader::new(fs::File::open(&path).map_err(text)?),
                ));
            }
        }
        files.sort_by(|a, b| a.0.cmp(&b.0));
        let journal = fs::read_to_string(folder.join(JOURNAL)).map_err(text)?;
        Self::parse(&journal, files)
    }

    /// Parses the texts: the journal, and each history with its name.
    pub(crate) fn parse(
        journal: &str,
        files: impl IntoIterator<Item = (String, impl BufRead)>,
    ) -> Result<Self, String> {
        let first = journal
            .lines()
            .next()
            .and_then(|line| line.strip_prefix("# "))
            .ok_or("no settings in the journal")?;
        let settings = Settings::parse(&first.split(' ').collect::<Vec<_>>())?;
        let mut records = Self {
            mode: settings.modes[0],
            ops: Vec::new(),
            writes: Vec::new(),
            taken: Vec::new(),
            clients: HashMap::new(),
            weather: Weather::read(journal),
            calm: u64::MAX,
        };
        if let Some(time) = journal.lines().find_map(|line| line.strip_suffix(" calm")) {
            records.calm = time.parse().map_err(|_| "no time of the calm")?;
        }
        for (name, file) in files {
            let mut reader = Reader {
                name,
                numbers: HashMap::new(),
                puts: BTreeMap::new(),
                takes: BTreeMap::new(),
            };
            let mut cut_off = None;
            for line in file.lines() {
                let line = line.map_err(|error| error.to_string())?;
                // only the last line may be cut off, by a kill
                if let Some(before) = cut_off.take() {
                    return Err(format!("{}: {before}", reader.name));
                }
                if reader.line(&line, &mut records).is_none() {
                    cut_off = Some(line);
                }
            }
        }
        records.weather.sort();
        Ok(records)
    }

    pub(crate) fn client(&self, op: &Op) -> Client {
        self.clients
            .get(op.client())
            .copied()
            .expect("each client says its settings first")
    }
}

/// Reads one history. It maps the numbers of its operations to their records.
struct Reader {
    name: String,
    numbers: HashMap<u64, usize>,
    puts: BTreeMap<u64, usize>,
    takes: BTreeMap<String, usize>,
}

impl Reader {
    /// Reads one line. Returns `None` if it is malformed.
    fn line(&mut self, line: &str, records: &mut Records) -> Option<()> {
        let words: Vec<&str> = line.split(' ').collect();
        let time: u64 = words.first()?.parse().ok()?;
        let what = *words.get(1)?;
        let number = |at: usize| words.get(at)?.parse::<u64>().ok();
        match what {
            "conf" => {
                let client = Client {
                    watchdog: number(3)? * MILLI,
                    link: words.get(4)?.parse().ok(),
                };
                records.clients.insert((*words.get(2)?).to_owned(), client);
                return Some(());
            }
            "gap" | "agap" => {
                let event = if what == "gap" {
                    Event::Starved
                } else {
                    Event::Blocked
                };
                records.weather.gap(event, &self.name, number(2)?, time);
                return Some(());
            }
            _ if what.starts_with("sgap") => {
                records
                    .weather
                    .server_gap(what[4..].parse().ok()?, number(2)?, time);
                return Some(());
            }
            "call" => {
                let op = self.call(time, &words)?;
                self.numbers.insert(number(2)?, records.ops.len());
                records.ops.push(op);
                return Some(());
            }
            "take" => {
                let (what, task) = ((*words.get(3)?).to_owned(), (*words.get(4)?).to_owned());
                self.takes
                    .insert((*words.get(2)?).to_owned(), records.taken.len());
                records.taken.push(Taken {
                    what,
                    task,
                    begin: time,
                    end: None,
                });
                return Some(());
            }
            "taken" => {
                let taken = &mut records.taken[*self.takes.get(*words.get(2)?)?];
                taken.end = Some((time, (*words.get(3)?).to_owned()));
                return Some(());
            }
            "put" => {
                self.puts.insert(number(2)?, records.writes.len());
                let (id, key) = (self.id(number(2)?), (*words.get(3)?).to_owned());
                let write = Write {
                    id,
                    key,
                    token: number(4)?,
                    begin: time,
                    end: u64::MAX,
                    result: String::new(),
                };
                records.writes.push(write);
                return Some(());
            }
            "done" => {
                let write = &mut records.writes[*self.puts.get(&number(2)?)?];
                write.end = time;
                (*words.get(3)?).clone_into(&mut write.result);
                return Some(());
            }
            _ => {}
        }
        let op = &mut records.ops[*self.numbers.get(&number(2)?)?];
        event(op, time, &words)
    }

    fn id(&self, number: u64) -> String {
        format!("{}#{number}", self.name)
    }

    fn call(&self, time: u64, words: &[&str]) -> Option<Op> {
        let [
            number,
            task,
            who,
            kind,
            locks,
            class,
            way,
            limit,
            lease,
            parent,
        ] = words.get(2..12)?
        else {
            return None;
        };
        let optional = |word: &str| word.parse::<u64>().ok();
        Some(Op {
            id: self.id(number.parse().ok()?),
            task: (*task).to_owned(),
            who: (*who).to_owned(),
            kind: Kind::named(kind).ok()?,
            locks: locks.split('+').map(str::to_owned).collect(),
            class: if *class == "shared" {
                Class::Shared
            } else {
                Class::Alone
            },
            way: (*way).to_owned(),
            limit: optional(limit).map(|ms| ms * MILLI),
            lease: optional(lease).map(|ms| ms * MILLI),
            parent: optional(parent).and_then(|parent| self.numbers.get(&parent).copied()),
            call: time,
            end: None,
            trip: 0,
            token: None,
            ok: None,
            deadline: 0,
            lost: None,
            told: None,
            release: None,
            released: None,
            extension: None,
            extended: Vec::new(),
            questions: Vec::new(),
            back: None,
        })
    }
}

/// Applies an event to its operation. Returns `None` if it is malformed.
fn event(op: &mut Op, time: u64, words: &[&str]) -> Option<()> {
    let text = |at: usize| {
        words
            .get(at)
            .map_or(String::new(), |word| (*word).to_owned())
    };
    match words[1] {
        "got" => {
            op.end = Some((time, Outcome::Got));
            op.token = words.get(4)?.parse().ok();
        }
        "trip" => op.trip = words.get(3)?.parse::<u64>().ok()? * 1000,
        "none" => op.end = Some((time, Outcome::None)),
        "gone" => op.end = Some((time, Outcome::Gone)),
        "err" => op.end = Some((time, Outcome::Failed(text(3)))),
        "ok" => {
            op.ok = Some((op.ok.map_or(time, |(first, _)| first), time));
            op.deadline = op
                .deadline
                .max(time + words.get(3)?.parse::<u64>().ok()? * 1000);
            if op.lost.is_some() || op.told.is_some() {
                op.back = Some(time);
            }
        }
        "lost" => op.lost = op.lost.or(Some(time)),
        "told" => {
            if op.told.as_ref().is_none_or(|(_, reason)| reason.is_empty()) {
                op.told = Some((op.told.as_ref().map_or(time, |(first, _)| *first), text(3)));
            }
        }
        "rel" => op.release = Some((time, text(3))),
        "end" => op.released = Some((time, text(3))),
        "ext" => op.extension = Some((time, words.get(3)?.parse::<u64>().ok()? * MILLI)),
        "extended" => op.extended.push((time, text(3))),
        "count" => op.questions.push((time, "count", text(3), text(4))),
        "holder" => op.questions.push((time, "holder", text(3), text(4))),
        _ => return None,
    }
    Some(())
}
