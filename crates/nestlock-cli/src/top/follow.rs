//! Asks the server, again and again, and tells the screen. It discovers seldom, and refreshes often.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use tokio::{
    sync::{mpsc::Sender, watch},
    time::{sleep, timeout},
};

use crate::{
    Failure,
    args::Server,
    locks::{self, Candidate, Findings, Wanted},
    ls::DISCOVER,
    raw::{Ears, Raw},
    whose::People,
};

/// After what went wrong, it is tried again.
const AGAIN: Duration = Duration::from_secs(1);
/// It is done without ears that take longer to open.
const LISTEN: Duration = Duration::from_secs(5);
/// A server of very many locks rests so many times as long as it was asked for.
const REST: u32 = 4;

/// What the screen is told.
pub(super) enum News {
    Locks {
        findings: Findings,
        since_discovery: Duration,
        /// A second; `None`: this user may not hear of them.
        releases: Option<f64>,
    },
    People(People),
    /// The server does not answer.
    Trouble(String),
}

/// How often to ask; `None`: not now.
pub(super) type Pace = Option<Duration>;

/// Goes on until nobody listens.
pub(super) async fn follow(
    raw: Raw,
    server: &Server,
    wanted: &Wanted,
    mut pace: watch::Receiver<Pace>,
    tell: Sender<News>,
) {
    let mut followed =
        Followed { wanted, raw, candidates: BTreeSet::new(), discovered: None, people: None, ears: None };
    let mut is_new = true;
    loop {
        let began = Instant::now();
        let mut outcome = followed.ask(&tell).await;
        let took = began.elapsed();
        if let Err(error) = &outcome {
            if tell.send(News::Trouble(error.to_string())).await.is_err() {
                return;
            }
            sleep(AGAIN).await;
            outcome = Raw::connect(server).await.map(|raw| followed.raw = raw);
            (followed.ears, is_new) = (None, true);
        } else if std::mem::take(&mut is_new) {
            // after what can be seen at once
            followed.ears = timeout(LISTEN, Ears::open(server, &followed.raw)).await.ok().flatten();
        }
        let rest = if outcome.is_ok() { took * REST } else { AGAIN };
        if tell.is_closed() {
            return;
        }
        sleep(rest).await;
        // the next in time, or as soon as it may go on
        while pace.borrow_and_update().is_none_or(|every| began.elapsed() < every) {
            let left = pace.borrow().map_or(DISCOVER, |every| every.saturating_sub(began.elapsed()));
            tokio::select! {
                changed = pace.changed() => if changed.is_err() { return },
                () = sleep(left) => {}
            }
        }
    }
}

struct Followed<'w> {
    wanted: &'w Wanted,
    raw: Raw,
    candidates: BTreeSet<Candidate>,
    /// When, and how long it took.
    discovered: Option<(Instant, Duration)>,
    /// As they were asked for last.
    people: Option<(Instant, People)>,
    ears: Option<Ears>,
}

impl Followed<'_> {
    async fn ask(&mut self, tell: &Sender<News>) -> Result<(), Failure> {
        if self.discovered.is_none_or(|(at, took)| at.elapsed() >= DISCOVER.max(took * REST)) {
            let began = Instant::now();
            self.candidates = locks::discover(&self.raw, self.wanted).await?;
            self.discovered = Some((Instant::now(), began.elapsed()));
        }
        let heard = self.ears.as_mut().and_then(Ears::heard);
        let releases = heard.as_ref().map(|(releases, _)| *releases);
        // who releases a lock may be followed by whoever waited: it is seen before all keys are looked through again
        if self.wanted.pattern.is_none() {
            self.candidates.extend(heard.into_iter().flat_map(|(_, names)| names).map(Candidate::Hash));
        }
        let findings = locks::read(&self.raw, self.wanted, &self.candidates).await?;
        // dear for the server: only for somebody who is not known, and seldom
        let is_due =
            self.people.as_ref().is_none_or(|(met, people)| met.elapsed() >= DISCOVER && people.unknown.is_none());
        if is_due && self.has_strangers(&findings) {
            let people = People::ask(&self.raw).await;
            self.people = Some((Instant::now(), people.clone()));
            let _ = tell.send(News::People(people)).await;
        }
        let since_discovery = self.discovered.map_or(Duration::ZERO, |(at, _)| at.elapsed());
        let _ = tell.send(News::Locks { findings, since_discovery, releases }).await;
        Ok(())
    }

    /// Whether somebody holds a lock of whom nothing is known.
    fn has_strangers(&self, findings: &Findings) -> bool {
        let is_known = |owner: &str| self.people.as_ref().is_some_and(|(_, people)| people.of(owner).is_some());
        findings.found.values().flat_map(|found| &found.holders).any(|(owner, _)| !is_known(owner))
    }
}
