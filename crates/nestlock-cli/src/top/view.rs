//! Renders the state into a frame. No I/O.

use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::Line,
    widgets::{Block, Clear, Paragraph, Row, Table, TableState, Wrap},
};

use super::state::{Column, Mode, State};
use crate::{locks::held_secs, ls::printable};

/// How many holders of a lock the details show.
pub(super) const HOLDERS: usize = 20;
const HELP: &str = "\
q, Ctrl-C   quit                 Enter   details
arrows, j k g G   move           Space   pause
/           filter (Esc clears)  + -     polling interval
s           sort by next column  I       invert the order
f           free a lock, after confirmation";

pub(super) fn draw(state: &mut State, frame: &mut Frame<'_>) {
    let [head, body, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Min(1),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    frame.render_widget(Line::from(title(state)), head);
    table(state, frame, body);
    frame.render_widget(Line::from(bottom(state)), foot);
    match &state.mode {
        Mode::Help => popup(frame, "Keys", HELP),
        Mode::Details => popup(frame, "Details", &details(state)),
        Mode::Question { name, owner, .. } => {
            let question = format!(
                "Free {}, which {} holds?\n\ny: yes   any other key: no",
                printable(name),
                printable(owner)
            );
            popup(frame, "Free it?", &question);
        }
        Mode::Normal | Mode::Filter => {}
    }
}

fn title(state: &State) -> String {
    format!(
        "nestlock top  {}  locks: {}  releases: {}/s  {}, discovered {} s ago  by {}{}{}",
        state.address,
        state.total(),
        state
            .releases
            .map_or("-".to_owned(), |releases| format!("{releases:.0}")),
        state.interval_text(),
        state.since_discovery.as_secs(),
        state.column.name(),
        if state.inverted { ", inverted" } else { "" },
        if state.read_only { "  read-only" } else { "" },
    )
}

fn bottom(state: &State) -> String {
    match (&state.mode, &state.message) {
        (Mode::Filter, _) => format!("/{}_", state.filter),
        (_, Some(message)) => printable(message),
        _ if state.trouble.is_some() => printable(state.trouble.as_deref().unwrap_or_default()),
        _ if !state.filter.is_empty() => {
            format!("filter: {}   Esc clears it   ? help", state.filter)
        }
        _ => "? help   / filter   s sort   Enter details   q quit".to_owned(),
    }
}

fn table(state: &mut State, frame: &mut Frame<'_>, area: Rect) {
    let sorted_by = state.column;
    let mark = |column: Column, name: &str| {
        if sorted_by == column {
            format!("{name}*")
        } else {
            name.to_owned()
        }
    };
    let colours = state.colours;
    // as many columns as fit
    let all = [
        (60, Constraint::Length(11), mark(Column::Waiting, "WAITING")),
        (0, Constraint::Fill(2), mark(Column::Name, "NAME")),
        (100, Constraint::Length(10), mark(Column::Kind, "KIND")),
        (40, Constraint::Fill(3), "HOLDER".to_owned()),
        (100, Constraint::Length(6), mark(Column::Holds, "HOLDS")),
        (30, Constraint::Length(10), mark(Column::Ttl, "TTL")),
        (100, Constraint::Length(17), "TOKEN".to_owned()),
    ];
    let has_room = all.each_ref().map(|(from, ..)| area.width >= *from);
    let seen = |cells: [String; 7]| {
        cells
            .into_iter()
            .zip(has_room)
            .filter_map(|(cell, has_room)| has_room.then_some(cell))
    };
    let widths = all
        .iter()
        .zip(has_room)
        .filter_map(|((_, width, _), has_room)| has_room.then_some(*width));
    let widths: Vec<Constraint> = widths.collect();
    let header = Row::new(seen(all.map(|(.., name)| name)));
    // only the visible rows, as there may be very many locks; the header takes one row
    let (shown, at) = state.rows(usize::from(area.height.saturating_sub(1)));
    let shown = shown.to_vec();
    let rows = shown.iter().filter_map(|key| state.get(key)).map(|found| {
        let row = Row::new(seen([
            found.waiting_text(),
            printable(&found.name),
            found.kind_text(),
            holder(state, found),
            found.holds_text(),
            found.ttl_text(),
            found.token_text(),
        ]));
        // the lease is about to end
        if colours && found.ttl.is_some_and(|ttl| ttl < 1_000) {
            row.style(Style::new().fg(Color::Yellow))
        } else {
            row
        }
    });
    let table = Table::new(rows, widths)
        .header(header.style(Style::new().add_modifier(Modifier::BOLD)))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    frame.render_stateful_widget(table, area, &mut TableState::new().with_selected(at));
}

/// Returns the program of the holder if it is known, otherwise the owner in the record.
fn holder(state: &State, found: &crate::locks::Found) -> String {
    let Some((owner, _)) = found.holders.first() else {
        return "-".to_owned();
    };
    let more = match found.holders.len() {
        0 | 1 => String::new(),
        holders => format!(" +{}", holders - 1),
    };
    let note = found.note(owner);
    let known = match (state.whose(owner), note) {
        (Some(whose), _) => Some((&whose.application, &whose.host, whose.process.clone())),
        (None, Some(note)) => Some((&note.application, &note.host, note.process.to_string())),
        (None, None) => None,
    };
    let who = known.map_or_else(
        || owner.clone(),
        |(application, host, process)| format!("{application} on {host} ({process})"),
    );
    let why = note.map_or_else(String::new, |note| format!(": {}", note.note));
    printable(&(who + &more + &why))
}

fn details(state: &State) -> String {
    let Some(found) = state.selected.as_ref().and_then(|name| state.get(name)) else {
        return "the lock is free now".to_owned();
    };
    let mut lines = vec![
        format!("name     {}", printable(&found.name)),
        format!("kind     {}", found.kind_text()),
        format!("TTL      {}", found.ttl_text()),
        format!("waiting  {}", found.waiting_text()),
        format!("token    {}", found.token_text()),
    ];
    for (owner, holds) in found.holders.iter().take(HOLDERS) {
        lines.push(format!("holder   {} x{holds}", printable(owner)));
        if let Some(whose) = state.whose(owner) {
            let (application, host, process) = (&whose.application, &whose.host, &whose.process);
            lines.push(format!(
                "         {application} on {host}, process {process}, connected for {} s",
                whose.age
            ));
        }
        if let Some(note) = found.note(owner) {
            let (held, why) = (held_secs(note), printable(&note.note));
            lines.push(format!("         held for {held} s: {why}"));
        }
    }
    lines.extend(state.unknown().map(str::to_owned));
    lines.join("\n")
}

fn popup(frame: &mut Frame<'_>, title: &str, text: &str) {
    let area = frame.area();
    // the borders and the padding take 4 columns, and the borders 2 rows
    let wide = text
        .lines()
        .map(|line| line.chars().count())
        .max()
        .unwrap_or(0) as u16
        + 4;
    let width = wide.min(area.width.saturating_sub(4));
    let inner = usize::from(width.saturating_sub(4)).max(1);
    let lines: usize = text
        .lines()
        .map(|line| line.chars().count().div_ceil(inner).max(1))
        .sum();
    let height = (lines as u16 + 2).min(area.height.saturating_sub(2));
    let place = Rect {
        x: (area.width - width) / 2,
        y: (area.height - height) / 2,
        width,
        height,
    };
    frame.render_widget(Clear, place);
    let block = Block::bordered()
        .title(title)
        .padding(ratatui::widgets::Padding::horizontal(1));
    frame.render_widget(
        Paragraph::new(text).block(block).wrap(Wrap { trim: false }),
        place,
    );
}

#[cfg(test)]
mod tests {
    use ratatui::{Terminal, backend::TestBackend};

    use super::{super::state::tests::state, *};
    use crate::locks::Record;

    fn screen(state: &mut State) -> String {
        let mut terminal = Terminal::new(TestBackend::new(100, 12)).unwrap();
        terminal.draw(|frame| draw(state, frame)).unwrap();
        let buffer = terminal.backend().buffer();
        let line = |y: u16| {
            (0..100)
                .map(|x| buffer[(x, y)].symbol())
                .collect::<String>()
                .trim_end()
                .to_owned()
        };
        (0..12).map(line).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn what_is_known_is_shown_and_what_is_not_is_a_dash() {
        let mut state = state(&[("order:7", Some(3)), ("quiet", None)]);
        let screen = screen(&mut state);
        insta::assert_snapshot!(screen);
    }

    #[test]
    fn a_note_follows_its_holder() {
        let mut state = state(&[("order:7", None)]);
        state.note("order:7", "nightly import");
        assert!(screen(&mut state).contains("shop on web-1 (77)"));
        (state.selected, state.mode) = (Some("order:7".into()), Mode::Details);
        assert!(screen(&mut state).contains("s: nightly import"));
    }

    #[test]
    fn a_question_names_the_lock_and_its_holder() {
        let mut state = state(&[("order:7", Some(3))]);
        state.mode = Mode::Question {
            name: "order:7".into(),
            record: Record::Reentrant,
            owner: "0a1b2c3d-1111-4222-8333-444455556666:42".into(),
        };
        insta::assert_snapshot!(screen(&mut state));
    }

    /// The selected row is always visible, and rows do not move without need.
    #[test]
    fn very_many_locks_are_walked_through() {
        let names: Vec<String> = (0..100_000).map(|n| format!("l{n:06}")).collect();
        let locks: Vec<(&str, Option<u64>)> = names.iter().map(|name| (&**name, None)).collect();
        let mut state = state(&locks);
        let first = |screen: &str| {
            screen
                .lines()
                .nth(2)
                .unwrap()
                .split_whitespace()
                .nth(1)
                .unwrap()
                .to_owned()
        };
        assert_eq!(first(&screen(&mut state)), "l000000");
        state.selected = Some("l099999".into());
        let end = screen(&mut state);
        // twelve rows, of which the title, the header and the footer take three
        assert!(first(&end) == "l099991" && end.contains("l099999"), "{end}");
        state.selected = Some("l099995".into());
        assert_eq!(first(&screen(&mut state)), "l099991");
        state.selected = Some("l000500".into());
        assert_eq!(first(&screen(&mut state)), "l000500");
        state.order.truncate(3);
        assert_eq!(first(&screen(&mut state)), "l000000");
    }

    #[test]
    fn a_missing_reply_is_reported() {
        let mut state = state(&[("order:7", Some(3))]);
        state.trouble("cannot connect: Connection refused: this data is old; retrying".into());
        let told = screen(&mut state);
        assert!(
            told.contains("order:7")
                && told.contains("cannot connect: Connection refused: this data is old"),
            "{told}"
        );
    }

    #[test]
    fn details_help_and_a_narrow_terminal_do_not_panic() {
        let mut state = state(&[("order:7", Some(3))]);
        for mode in [
            Mode::Help,
            Mode::Details,
            Mode::Filter,
            Mode::Question {
                name: "x".repeat(300),
                record: Record::Reentrant,
                owner: String::new(),
            },
        ] {
            state.mode = mode;
            for (width, height) in [(1, 1), (5, 3), (20, 5), (200, 60)] {
                let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
                terminal.draw(|frame| draw(&mut state, frame)).unwrap();
            }
        }
    }
}
