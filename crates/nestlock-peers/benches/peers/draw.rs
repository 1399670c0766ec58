//! The charts, drawn from the figures alone.
#![allow(clippy::cast_possible_wrap)] // of pixels

use std::path::Path;

use plotters::{
    coord::Shift,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use crate::{
    contenders::{self, named},
    figures::{Contender, Figures, Pairs},
};

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

const WIDTH: u32 = 900;
const INK: RGBColor = RGBColor(40, 40, 40);
const FAINT: RGBColor = RGBColor(222, 222, 222);
/// The height of a bar, and of a group's title.
const BAR: i32 = 22;
const TITLE: i32 = 34;
/// Where bars begin, and how much room is behind them.
const LEFT: i32 = 210;
const RIGHT: i32 = 230;
const TOP: i32 = 78;
const BOTTOM: i32 = 14;

/// A row of a chart: a contender with a bar for each figure, or why it has none.
struct Row {
    name: String,
    color: RGBColor,
    figures: Result<Vec<f64>, String>,
    text: String,
}

/// Returns a contender's figures and their text. Returns `None` if it has none.
type Shown = fn(&Contender) -> Option<(Vec<f64>, String)>;

/// Rows under one title, with a scale of their own.
struct Group {
    title: String,
    rows: Vec<Row>,
}

struct Bars {
    file: &'static str,
    title: &'static str,
    better: &'static str,
    /// For figures that differ by orders of magnitude.
    log: bool,
    groups: Vec<Group>,
}

fn color(name: &str) -> RGBColor {
    named(name).map_or(INK, |contender| {
        let (red, green, blue) = contender.color;
        RGBColor(red, green, blue)
    })
}

fn text(area: &Area<'_>, text: &str, at: (i32, i32), size: u32, ink: RGBColor, anchor: HPos) {
    let style = ("sans-serif", size)
        .into_font()
        .color(&ink)
        .pos(Pos::new(anchor, VPos::Center));
    area.draw(&Text::new(text.to_owned(), at, style))
        .expect("a drawing");
}

fn headline(area: &Area<'_>, figures: &Figures, title: &str, better: &str) {
    area.fill(&WHITE).expect("a drawing");
    text(area, title, (16, 24), 22, INK, HPos::Left);
    let Figures {
        server,
        cores,
        rounds,
        seconds,
        date,
        ..
    } = figures;
    let trial = if figures.is_trial() {
        "a TRIAL of "
    } else {
        "medians of "
    };
    let below = format!(
        "{better}; {server} on loopback, {cores} cores, {trial}{rounds} rounds of {seconds} s, {date}"
    );
    text(
        area,
        &below,
        (16, 50),
        14,
        RGBColor(110, 110, 110),
        HPos::Left,
    );
}

/// Returns a row for each contender. A row without figures says why.
fn rows(figures: &Figures, of: impl Fn(&Contender) -> Option<(Vec<f64>, String)>) -> Vec<Row> {
    let row = |name: &str| {
        let (figures, text) = match figures.contender(name) {
            None => (Err("not asked".into()), String::new()),
            Some(contender) => match (of(contender), &contender.absent) {
                (Some((figures, text)), None) => (Ok(figures), text),
                (Some((figures, text)), Some(_)) => (Ok(figures), text + " (left the run)"),
                (None, Some(why)) => (Err(format!("absent: {why}")), String::new()),
                (None, None) => (Err("cannot wait".into()), String::new()),
            },
        };
        Row {
            name: name.to_owned(),
            color: color(name),
            figures,
            text,
        }
    };
    contenders::ALL
        .iter()
        .map(|contender| row(contender.name))
        .collect()
}

fn pairs(contender: &Contender, tasks: usize) -> Option<&Pairs> {
    contender.pairs.iter().find(|pairs| pairs.tasks == tasks)
}

impl Bars {
    fn draw(&self, figures: &Figures, folder: &Path) -> String {
        let height: i32 = self
            .groups
            .iter()
            .map(|group| TITLE + group.rows.len() as i32 * BAR + 12)
            .sum();
        let file = folder.join(self.file);
        #[allow(clippy::cast_sign_loss)] // a sum of what is positive
        let area =
            SVGBackend::new(&file, (WIDTH, (TOP + height + BOTTOM) as u32)).into_drawing_area();
        headline(&area, figures, self.title, self.better);
        let mut y = TOP;
        for group in &self.groups {
            text(
                &area,
                &group.title,
                (16, y + TITLE / 2 - 4),
                16,
                INK,
                HPos::Left,
            );
            y += TITLE;
            self.group(&area, group, y);
            y += group.rows.len() as i32 * BAR + 12;
        }
        area.present().expect("a file");
        self.file.to_owned()
    }

    fn group(&self, area: &Area<'_>, group: &Group, top: i32) {
        let all = || {
            group
                .rows
                .iter()
                .filter_map(|row| row.figures.as_ref().ok())
                .flatten()
                .copied()
        };
        let most = all().fold(f64::MIN_POSITIVE, f64::max);
        // a logarithmic bar has no zero: it begins at the power of ten below the least figure
        let least = 10_f64.powf(all().fold(most, f64::min).max(1e-6).log10().floor());
        let room = f64::from(WIDTH as i32 - LEFT - RIGHT);
        let length = |figure: f64| {
            let share = if self.log {
                (figure / least).log10() / (most / least).log10()
            } else {
                figure / most
            };
            (room * share.clamp(0.002, 1.0)) as i32
        };
        let mut decade = least;
        while self.log && decade <= most {
            let x = LEFT + length(decade);
            let bottom = top + group.rows.len() as i32 * BAR;
            area.draw(&PathElement::new([(x, top - 2), (x, bottom)], FAINT))
                .expect("a drawing");
            decade *= 10.0;
        }
        for (at, row) in group.rows.iter().enumerate() {
            let y = top + at as i32 * BAR;
            let size = if row.name == contenders::NESTLOCK {
                15
            } else {
                14
            };
            text(
                area,
                &row.name,
                (LEFT - 8, y + BAR / 2),
                size,
                row.color,
                HPos::Right,
            );
            let figures = match &row.figures {
                Ok(figures) => figures,
                Err(why) => {
                    let why: String = why.chars().take(70).collect();
                    text(
                        area,
                        &why,
                        (LEFT + 4, y + BAR / 2),
                        13,
                        RGBColor(150, 150, 150),
                        HPos::Left,
                    );
                    continue;
                }
            };
            let each = (BAR - 4) / figures.len().max(1) as i32;
            let mut end = LEFT;
            for (number, figure) in figures.iter().enumerate() {
                let y = y + 2 + number as i32 * each;
                let x = LEFT + length(*figure);
                // the second of two bars is lighter
                let fill = row.color.mix(if number == 0 { 0.95 } else { 0.45 });
                area.draw(&Rectangle::new(
                    [(LEFT, y), (x, y + each - 1)],
                    fill.filled(),
                ))
                .expect("a drawing");
                end = end.max(x);
            }
            text(area, &row.text, (end + 6, y + BAR / 2), 13, INK, HPos::Left);
        }
    }
}

/// Formats a figure for a label.
fn short(figure: f64) -> String {
    match figure {
        figure if figure >= 10_000.0 => format!("{:.1}k", figure / 1e3),
        figure if figure >= 100.0 => format!("{figure:.0}"),
        figure if figure >= 10.0 => format!("{figure:.1}"),
        figure => format!("{figure:.2}"),
    }
}

/// Draws pairs/s over tasks, both logarithmic. Returns the file's name.
fn lines(figures: &Figures, folder: &Path) -> String {
    let file = folder.join("peers-pairs.svg");
    let area = SVGBackend::new(&file, (WIDTH, 560)).into_drawing_area();
    headline(
        &area,
        figures,
        "lock + unlock without contention: pairs/s over tasks",
        "more is better",
    );
    let all = || {
        figures
            .contenders
            .iter()
            .flat_map(|contender| &contender.pairs)
    };
    let most = all().map(|pairs| pairs.per_second).fold(1.0, f64::max) * 1.3;
    let least = all().map(|pairs| pairs.per_second).fold(most, f64::min) / 1.3;
    let plot = area.margin(TOP, BOTTOM, 10, 190);
    let mut chart = ChartBuilder::on(&plot)
        .x_label_area_size(42)
        .y_label_area_size(64)
        .build_cartesian_2d((0.9_f64..300.0).log_scale(), (least..most).log_scale())
        .expect("a chart");
    chart
        .configure_mesh()
        .light_line_style(WHITE.mix(0.0))
        .bold_line_style(FAINT)
        .x_desc("tasks of one process (1, 8, 32, 256), each with a lock of its own")
        .x_label_formatter(&|tasks| format!("{tasks:.0}"))
        .y_label_formatter(&|rate| {
            if *rate >= 1e3 {
                format!("{:.0}k", rate / 1e3)
            } else {
                format!("{rate:.0}")
            }
        })
        .label_style(("sans-serif", 14).into_font().color(&INK))
        .draw()
        .expect("a drawing");
    let mut labels = Vec::new();
    for contender in &figures.contenders {
        let color = color(&contender.name);
        let points: Vec<_> = contender
            .pairs
            .iter()
            .map(|pairs| (pairs.tasks as f64, pairs.per_second))
            .collect();
        let width = if contender.name == contenders::NESTLOCK {
            4
        } else {
            2
        };
        chart
            .draw_series(LineSeries::new(points.clone(), color.stroke_width(width)))
            .expect("a drawing");
        let dots = points
            .iter()
            .map(|point| Circle::new(*point, width + 1, color.filled()));
        chart.draw_series(dots).expect("a drawing");
        let label = points
            .last()
            .map(|point| (chart.backend_coord(point).1, short(point.1)));
        let (y, behind) = label.unwrap_or((i32::MAX, "absent".into()));
        labels.push((y, format!("{}  {behind}", contender.name), color));
    }
    // names at the ends of the lines, pushed apart where they would overlap
    labels.sort_by_key(|label| label.0);
    let mut free = TOP;
    for (y, label, color) in labels {
        let y = y.min(540).max(free);
        text(
            &area,
            &label,
            (WIDTH as i32 - 182, y),
            14,
            color,
            HPos::Left,
        );
        free = y + 17;
    }
    area.present().expect("a file");
    "peers-pairs.svg".to_owned()
}

/// Draws all charts. Returns the names of the files.
pub(crate) fn all(figures: &Figures, folder: &Path) -> Vec<String> {
    let of_tasks = |title: &str, of: fn(&Pairs) -> (Vec<f64>, String)| {
        [1, 32, 256].map(|tasks| Group {
            title: format!(
                "{tasks} {}{title}",
                if tasks == 1 { "task" } else { "tasks" }
            ),
            rows: rows(figures, |contender| pairs(contender, tasks).map(of)),
        })
    };
    let one = |title: &str, of: Shown| {
        vec![Group {
            title: title.to_owned(),
            rows: rows(figures, of),
        }]
    };
    let charts = [
        Bars {
            file: "peers-latency.svg",
            title: "lock + unlock without contention: latency of a pair",
            better: "less is better",
            log: true,
            groups: of_tasks(
                ": median (dark) and p99 (light), us, logarithmic",
                |pairs| {
                    (
                        vec![pairs.p50_us, pairs.p99_us],
                        format!("{}, {} us", short(pairs.p50_us), short(pairs.p99_us)),
                    )
                },
            )
            .into(),
        },
        Bars {
            file: "peers-cpu.svg",
            title: "lock + unlock without contention: processor time of a pair",
            better: "less is better",
            log: true,
            groups: of_tasks(
                ": client (dark) and server (light), us, logarithmic",
                |pairs| {
                    (
                        vec![pairs.client_us, pairs.server_us],
                        format!("{}, {} us", short(pairs.client_us), short(pairs.server_us)),
                    )
                },
            )
            .into(),
        },
        Bars {
            file: "peers-handover.svg",
            title: "hand-over: unlock in one process to lock in another",
            better: "less is better",
            log: true,
            groups: one("median (dark) and p90 (light), logarithmic", |contender| {
                let hand = contender.handover.as_ref()?;
                let text = format!(
                    "{}, {} ms",
                    short(hand.p50_us / 1e3),
                    short(hand.p90_us / 1e3)
                );
                Some((vec![hand.p50_us, hand.p90_us], text))
            }),
        },
        Bars {
            file: "peers-drain.svg",
            title: "64 tasks of one process wait for one lock: waiters drained a second",
            better: "more is better",
            log: true,
            groups: one(
                "from the release on, until all have had it; logarithmic",
                |contender| {
                    let drain = contender.drain.as_ref()?;
                    Some((
                        vec![drain.per_second],
                        format!("{}/s ({} ms)", short(drain.per_second), short(drain.ms)),
                    ))
                },
            ),
        },
        Bars {
            file: "peers-memory.svg",
            title: "memory of the client's process",
            better: "less is better",
            log: false,
            groups: one(
                "resident: with 10,000 locks held (dark), just connected (light)",
                |contender| {
                    let memory = contender.memory.as_ref()?;
                    let [held, start] = [memory.held_kb, memory.start_kb].map(|kb| kb / 1024.0);
                    Some((
                        vec![held, start],
                        format!("{}, {} MB", short(held), short(start)),
                    ))
                },
            ),
        },
    ];
    let mut files = vec![lines(figures, folder)];
    files.extend(charts.iter().map(|chart| chart.draw(figures, folder)));
    files
}
