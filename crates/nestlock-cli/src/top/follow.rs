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
    ears::Ears,
    ls::DISCOVER,
    raw::{Away, Raw},
    search::{self, Candidate, Findings, Wanted, told},
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
    /// No server answers.
    Trouble(String),
}

/// How often to ask; `None`: not now.
pub(super) type Pace = Option<Duration>;

/// Goes on until nobody listens.
pub(super) async fn follow(
    raw: Raw<'_>,
    server: &Server,
    wanted: &Wanted,
    mut pace: watch::Receiver<Pace>,
    tell: Sender<News>,
) {
    let mut followed =
        Followed { wanted, raw, candidates: BTreeSet::new(), discovered: None, people: None, ears: None };
    let mut is_deaf = true;
    loop {
        let began = Instant::now();
        let outcome = followed.ask(&tell).await;
        let took = began.elapsed();
        match &outcome {
            Err(error) => {
                let why = format!("{error}: this is old; trying again");
                if tell.send(News::Trouble(why)).await.is_err() {
                    return;
                }
                (followed.ears, is_deaf) = (None, true);
            }
            Ok(_) if std::mem::take(&mut is_deaf) => {
                // after what can be seen at once
                let ears = Ears::open(&followed.raw, &server.prefix);
                followed.ears = timeout(LISTEN, ears).await.ok().flatten();
            }
            // the server that it listened at is gone
            Ok(_) => is_deaf = followed.ears.take_if(|ears| !ears.hear()).is_some(),
        }
        // who does not answer took most of the time
        let rest = if outcome.is_ok_and(|all_answer| all_answer) { took * REST } else { AGAIN };
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
    raw: Raw<'w>,
    candidates: BTreeSet<Candidate>,
    /// When, and how long it took.
    discovered: Option<(Instant, Duration)>,
    /// As they were asked for last.
    people: Option<(Instant, People)>,
    ears: Option<Ears>,
}

impl Followed<'_> {
    /// Whether all servers answer.
    async fn ask(&mut self, tell: &Sender<News>) -> Result<bool, Failure> {
        let mut away = Away::new();
        if self.discovered.is_none_or(|(at, took)| at.elapsed() >= DISCOVER.max(took * REST)) {
            let began = Instant::now();
            (self.candidates, away) = search::discover(&self.raw, self.wanted, &self.candidates).await?;
            // one that was away is looked through as soon as it is back
            self.discovered = away.is_empty().then(|| (Instant::now(), began.elapsed()));
        }
        let heard = self.ears.as_mut().and_then(Ears::heard);
        let releases = heard.as_ref().map(|(releases, _)| *releases);
        // who releases a lock may be followed by whoever waited: it is seen before all keys are looked through again
        if self.wanted.pattern.is_none() {
            self.candidates.extend(heard.into_iter().flat_map(|(_, names)| names).map(Candidate::Hash));
        }
        let mut findings = search::read(&self.raw, self.wanted, &self.candidates).await;
        // dear for the server: only for somebody who is not known, and seldom
        let is_due =
            self.people.as_ref().is_none_or(|(met, people)| met.elapsed() >= DISCOVER && people.unknown.is_none());
        if is_due && self.has_strangers(&findings) {
            let people = People::ask(&self.raw).await;
            self.people = Some((Instant::now(), people.clone()));
            let _ = tell.send(News::People(people)).await;
            findings.away.extend(self.raw.away());
        }
        findings.away.extend(away);
        if self.raw.is_dark(&findings.away) {
            return Err(told(&findings.away).into());
        }
        let all_answer = findings.away.is_empty() && findings.unheard.is_none();
        let since_discovery = self.discovered.map_or(Duration::ZERO, |(at, _)| at.elapsed());
        let _ = tell.send(News::Locks { findings, since_discovery, releases }).await;
        Ok(all_answer)
    }

    /// Whether somebody holds a lock of whom nothing is known.
    fn has_strangers(&self, findings: &Findings) -> bool {
        let is_known = |owner: &str| self.people.as_ref().is_some_and(|(_, people)| people.of(owner).is_some());
        findings.found.values().flat_map(|found| &found.holders).any(|(owner, _)| !is_known(owner))
    }
}
