//! The state of `top`, and how keys change it. No I/O.

use std::{
    cmp::{Ordering, Reverse},
    collections::BTreeMap,
    time::Duration,
};

use ratatui::crossterm::event::{Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use crate::{
    locks::{Found, Record, Waiting},
    search::{Findings, told},
    whose::{People, Whose},
};

const INTERVALS: [u64; 6] = [250, 500, 1_000, 2_000, 5_000, 10_000];

/// The column by which the locks are sorted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Column {
    Waiting,
    Name,
    Kind,
    Holds,
    Ttl,
}

impl Column {
    const ALL: [Self; 5] = [
        Self::Waiting,
        Self::Name,
        Self::Kind,
        Self::Holds,
        Self::Ttl,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Name => "name",
            Self::Kind => "kind",
            Self::Holds => "holds",
            Self::Ttl => "ttl",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Mode {
    Normal,
    Filter,
    Help,
    Details,
    /// Asks the user whether to free this lock, which this owner holds.
    Question {
        name: String,
        record: Record,
        owner: String,
    },
}

/// An action that a key requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Asked {
    Quit,
    /// A request to free this lock, if this owner still holds it.
    Free {
        name: String,
        record: Record,
        owner: String,
    },
}

#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "the flags are independent")]
pub(super) struct State {
    pub(super) address: String,
    pub(super) read_only: bool,
    /// False if `NO_COLOR` is set.
    pub(super) colours: bool,
    found: BTreeMap<String, Found>,
    /// The keys of the locks that are shown, in display order.
    pub(super) order: Vec<String>,
    /// The key of the selected lock. The selection follows the lock when its row moves.
    pub(super) selected: Option<String>,
    pub(super) column: Column,
    pub(super) inverted: bool,
    pub(super) filter: String,
    pub(super) mode: Mode,
    paused: bool,
    interval: Duration,
    pub(super) since_discovery: Duration,
    pub(super) message: Option<String>,
    pub(super) trouble: Option<String>,
    /// Releases per second. `None`: unknown.
    pub(super) releases: Option<f64>,
    /// The index of the first visible row.
    pub(super) offset: usize,
    people: People,
    dirty: bool,
}

impl State {
    pub(super) fn new(address: String, read_only: bool, interval: Duration) -> Self {
        Self {
            address,
            read_only,
            colours: true,
            found: BTreeMap::new(),
            order: Vec::new(),
            selected: None,
            column: Column::Waiting,
            inverted: false,
            filter: String::new(),
            mode: Mode::Normal,
            paused: false,
            interval,
            since_discovery: Duration::ZERO,
            message: None,
            trouble: None,
            releases: None,
            offset: 0,
            people: People::default(),
            dirty: true,
        }
    }

    /// Returns whether the state has changed since the last frame, and resets that.
    pub(super) fn is_dirty(&mut self) -> bool {
        std::mem::take(&mut self.dirty)
    }

    /// Returns whether the screen is frozen: `top` is paused, or a question is open.
    pub(super) fn is_paused(&self) -> bool {
        self.paused || matches!(self.mode, Mode::Question { .. })
    }

    /// Returns the polling interval. Returns `None` if `top` is paused.
    pub(super) fn pace(&self) -> Option<Duration> {
        (!self.is_paused()).then_some(self.interval)
    }

    pub(super) fn get(&self, name: &str) -> Option<&Found> {
        self.found.get(name)
    }

    pub(super) fn whose(&self, owner: &str) -> Option<&Whose> {
        self.people.of(owner)
    }

    pub(super) fn unknown(&self) -> Option<&'static str> {
        self.people.unknown
    }

    pub(super) fn total(&self) -> usize {
        self.found.len()
    }

    pub(super) fn meet(&mut self, people: People) {
        (self.people, self.dirty) = (people, true);
    }

    pub(super) fn refresh(&mut self, mut findings: Findings, since_discovery: Duration) {
        findings.keep(|key| self.found.get(key));
        let away = &findings.away;
        let old =
            (!away.is_empty()).then(|| format!("{}; the locks there may be stale", told(away)));
        self.trouble = old.or(findings.unheard.take());
        if let Some(what) = findings.denied.first()
            && self.message.is_none()
        {
            self.message = Some(format!("this user may not read everything (+{what})"));
        }
        self.found = findings.found;
        self.since_discovery = since_discovery;
        self.sort();
    }

    /// Reports why the data on the screen is old.
    pub(super) fn trouble(&mut self, why: String) {
        (self.trouble, self.dirty) = (Some(why), true);
    }

    pub(super) fn say(&mut self, message: String) {
        (self.message, self.dirty) = (Some(message), true);
    }

    fn sort(&mut self) {
        self.dirty = true;
        let filter = self.filter.to_lowercase();
        let is_shown =
            |found: &Found| filter.is_empty() || found.name.to_lowercase().contains(&filter);
        let mut shown: Vec<(&String, &Found)> = self
            .found
            .iter()
            .filter(|(_, found)| is_shown(found))
            .collect();
        let column = self.column;
        shown.sort_by(|(_, one), (_, other)| {
            compare(column, one, other).then_with(|| one.name.cmp(&other.name))
        });
        if self.inverted {
            shown.reverse();
        }
        self.order = shown.into_iter().map(|(key, _)| key.clone()).collect();
        if self
            .selected
            .as_ref()
            .is_none_or(|selected| !self.order.contains(selected))
        {
            self.selected = self.order.first().cloned();
        }
    }

    /// Handles an event of the terminal.
    pub(super) fn take(&mut self, event: &Event) -> Option<Asked> {
        self.dirty = true;
        match event {
            Event::Key(key) if key.kind != KeyEventKind::Release => self.press(*key),
            _ => None,
        }
    }

    fn press(
        &mut self,
        KeyEvent {
            code, modifiers, ..
        }: KeyEvent,
    ) -> Option<Asked> {
        if modifiers.contains(KeyModifiers::CONTROL) {
            // no other control key has an effect
            return (code == KeyCode::Char('c')).then_some(Asked::Quit);
        }
        self.message = None;
        match std::mem::replace(&mut self.mode, Mode::Normal) {
            Mode::Question {
                name,
                record,
                owner,
            } => {
                if code == KeyCode::Char('y') {
                    return Some(Asked::Free {
                        name,
                        record,
                        owner,
                    });
                }
                self.message = Some("nothing was freed".into());
            }
            Mode::Filter => self.edit(code),
            Mode::Help | Mode::Details
                if matches!(
                    code,
                    KeyCode::Esc | KeyCode::Enter | KeyCode::Char('q' | '?')
                ) => {}
            Mode::Help => self.mode = Mode::Help,
            Mode::Details => {
                self.mode = Mode::Details;
                self.walk(code);
            }
            Mode::Normal => return self.command(code),
        }
        None
    }

    fn command(&mut self, code: KeyCode) -> Option<Asked> {
        match code {
            KeyCode::Char('q') => return Some(Asked::Quit),
            KeyCode::Char('?') => self.mode = Mode::Help,
            KeyCode::Char('/') => self.mode = Mode::Filter,
            KeyCode::Char('s') => {
                let at = Column::ALL
                    .iter()
                    .position(|column| *column == self.column)
                    .unwrap_or(0);
                self.column = Column::ALL[(at + 1) % Column::ALL.len()];
                self.sort();
            }
            KeyCode::Char('I') => {
                self.inverted = !self.inverted;
                self.sort();
            }
            KeyCode::Char(' ') => self.paused = !self.paused,
            KeyCode::Char('+') => self.change_interval(1),
            KeyCode::Char('-') => self.change_interval(-1),
            KeyCode::Enter if self.selected.is_some() => self.mode = Mode::Details,
            KeyCode::Char('f') if !self.read_only => self.ask(),
            KeyCode::Esc if !self.filter.is_empty() => {
                self.filter.clear();
                self.sort();
            }
            code => self.walk(code),
        }
        None
    }

    fn walk(&mut self, code: KeyCode) {
        let last = self.order.len().saturating_sub(1);
        let at = self
            .selected
            .as_ref()
            .and_then(|name| self.order.iter().position(|known| known == name))
            .unwrap_or(0);
        let to = match code {
            KeyCode::Down | KeyCode::Char('j') => at + 1,
            KeyCode::Up | KeyCode::Char('k') => at.saturating_sub(1),
            KeyCode::PageDown => at + 10,
            KeyCode::PageUp => at.saturating_sub(10),
            KeyCode::Home | KeyCode::Char('g') => 0,
            KeyCode::End | KeyCode::Char('G') => last,
            _ => return,
        };
        self.selected = self.order.get(to.min(last)).cloned();
    }

    fn edit(&mut self, code: KeyCode) {
        self.mode = Mode::Filter;
        match code {
            KeyCode::Char(letter) => self.filter.push(letter),
            KeyCode::Backspace => _ = self.filter.pop(),
            KeyCode::Enter => self.mode = Mode::Normal,
            KeyCode::Esc => {
                self.mode = Mode::Normal;
                self.filter.clear();
            }
            _ => {}
        }
        self.sort();
    }

    fn change_interval(&mut self, by: isize) {
        let now = self.interval.as_millis() as u64;
        let at = INTERVALS
            .iter()
            .position(|interval| *interval >= now)
            .unwrap_or(INTERVALS.len() - 1);
        let at = at.saturating_add_signed(by).min(INTERVALS.len() - 1);
        self.interval = Duration::from_millis(INTERVALS[at]);
    }

    fn ask(&mut self) {
        let Some(found) = self.selected.as_ref().and_then(|name| self.found.get(name)) else {
            return;
        };
        if let Some((owner, _)) = found.holders.first() {
            self.mode = Mode::Question {
                name: found.name.clone(),
                record: found.record,
                owner: owner.clone(),
            };
        }
    }

    /// Returns the rows that fit into a table of this height, with the selected one among them, and
    /// its index there.
    pub(super) fn rows(&mut self, height: usize) -> (&[String], Option<usize>) {
        let at = self
            .selected
            .as_ref()
            .and_then(|key| self.order.iter().position(|known| known == key));
        let height = height.max(1);
        // scroll back rather than leave empty rows at the end
        self.offset = self.offset.min(self.order.len().saturating_sub(height));
        if let Some(at) = at {
            self.offset = self.offset.clamp((at + 1).saturating_sub(height), at);
        }
        let rows = &self.order[self.offset..];
        (
            &rows[..rows.len().min(height)],
            at.map(|at| at - self.offset),
        )
    }

    pub(super) fn interval_text(&self) -> String {
        if self.paused {
            "paused".to_owned()
        } else {
            format!("every {:?}", self.interval)
        }
    }
}

/// Compares two locks: the more interesting one comes first.
fn compare(column: Column, one: &Found, other: &Found) -> Ordering {
    let waiting = |found: &Found| Reverse(found.waiting.map(Waiting::count));
    match column {
        Column::Waiting => waiting(one).cmp(&waiting(other)),
        Column::Name => Ordering::Equal,
        Column::Kind => one.record.cmp(&other.record),
        Column::Holds => Reverse(one.holds()).cmp(&Reverse(other.holds())),
        Column::Ttl => one.ttl.cmp(&other.ttl),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const OWNER: &str = "0a1b2c3d-1111-4222-8333-444455556666";

    pub(crate) fn found(name: &str, waiting: Option<Waiting>) -> (String, Found) {
        let holders = vec![(format!("{OWNER}:{name}"), 1)];
        let found = Found {
            name: name.to_owned(),
            record: Record::Reentrant,
            holders,
            ttl: Some(29_000),
            waiting,
            last_token: None,
            permits: None,
            notes: Vec::new(),
        };
        (name.to_owned(), found)
    }

    pub(crate) fn state(locks: &[(&str, Option<u64>)]) -> State {
        let mut state = State::new("127.0.0.1:6379".into(), false, Duration::from_secs(1));
        refresh(&mut state, locks);
        state
    }

    impl State {
        /// Gives the holder of this lock a note.
        pub(crate) fn note(&mut self, name: &str, note: &str) {
            let found = self.found.get_mut(name).unwrap();
            let (owner, _) = found.holders[0].clone();
            let text = format!("7 1700000000000\nshop:web-1:77\n{note}");
            found.take_note(&owner, &text.into());
        }
    }

    fn refresh(state: &mut State, locks: &[(&str, Option<u64>)]) {
        let found = locks
            .iter()
            .map(|(name, waiting)| found(name, waiting.map(Waiting::Clients)))
            .collect();
        state.refresh(
            Findings {
                found,
                ..Findings::default()
            },
            Duration::from_secs(4),
        );
    }

    fn press(state: &mut State, keys: &str) -> Option<Asked> {
        let mut asked = None;
        for key in keys.chars() {
            let code = match key {
                '\n' => KeyCode::Enter,
                '\x1b' => KeyCode::Esc,
                key => KeyCode::Char(key),
            };
            asked = state.take(&Event::Key(KeyEvent::new(code, KeyModifiers::NONE)));
        }
        asked
    }

    /// The lock with the most waiters comes first, and a lock whose waiters are not known comes
    /// last.
    #[test]
    fn the_list_puts_most_awaited_locks_first_and_unknown_ones_last() {
        let mut state = state(&[("a", None), ("b", Some(0)), ("c", Some(7)), ("d", Some(7))]);
        assert_eq!(state.order, ["c", "d", "b", "a"]);
        press(&mut state, "I");
        assert_eq!(state.order, ["a", "b", "d", "c"]);
        press(&mut state, "Is");
        assert_eq!(state.order, ["a", "b", "c", "d"]);
    }

    #[test]
    fn the_selection_sticks_to_the_lock() {
        let mut state = state(&[("a", Some(3)), ("b", Some(2)), ("c", Some(1))]);
        press(&mut state, "j");
        assert_eq!(state.selected.as_deref(), Some("b"));
        refresh(
            &mut state,
            &[("a", Some(3)), ("b", Some(0)), ("c", Some(1))],
        );
        assert_eq!(
            (state.selected.as_deref(), &*state.order[2]),
            (Some("b"), "b")
        );
        refresh(&mut state, &[("a", Some(3)), ("c", Some(1))]);
        assert_eq!(state.selected.as_deref(), Some("a"), "it is gone");
        press(&mut state, "G");
        assert_eq!(state.selected.as_deref(), Some("c"));
    }

    /// A lock is freed only after `y`, and nothing moves while the question is open.
    #[test]
    fn top_frees_a_lock_only_after_a_yes_and_pauses_at_the_question() {
        let mut state = state(&[("a", Some(3))]);
        assert_eq!(press(&mut state, "f"), None);
        assert!(state.is_paused());
        assert_eq!(press(&mut state, "\n"), None, "no is the default");
        assert!(!state.is_paused());
        assert_eq!(
            press(&mut state, "fy"),
            Some(Asked::Free {
                name: "a".into(),
                record: Record::Reentrant,
                owner: format!("{OWNER}:a")
            })
        );
        state.read_only = true;
        assert_eq!(press(&mut state, "fy"), None);
        // Control-D deletes in k9s, to the surprise of its users; here it must not
        let control_d = KeyEvent::new(KeyCode::Char('d'), KeyModifiers::CONTROL);
        assert_eq!(state.take(&Event::Key(control_d)), None);
    }

    #[test]
    fn a_filter_is_typed_and_cleared() {
        let mut state = state(&[("order:1", Some(3)), ("invoice:1", None)]);
        press(&mut state, "/ORDq");
        assert!(state.order.is_empty());
        state.take(&Event::Key(KeyEvent::new(
            KeyCode::Backspace,
            KeyModifiers::NONE,
        )));
        assert_eq!(state.order, ["order:1"]);
        assert_eq!(press(&mut state, "\n\x1b"), None);
        assert_eq!(state.order.len(), 2);
        assert_eq!(press(&mut state, "q"), Some(Asked::Quit));
    }

    #[test]
    fn the_interval_stays_within_its_limits() {
        let mut state = state(&[]);
        press(&mut state, "++++++++");
        assert_eq!(state.pace(), Some(Duration::from_secs(10)));
        press(&mut state, "---------");
        assert_eq!(state.pace(), Some(Duration::from_millis(250)));
        press(&mut state, " ");
        assert!(state.is_paused());
    }
}
