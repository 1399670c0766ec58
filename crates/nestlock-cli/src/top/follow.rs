//! Polls the servers, and sends the results to the screen. It discovers new locks rarely, and
//! refreshes the known ones often.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use tokio::{
    sync::{mpsc::Sender, watch},
    time::{sleep, timeout},
};

use crate::{
    args::Server,
    ears::Ears,
    failure::Failure,
    ls::DISCOVER,
    raw::{Away, Raw},
    search::{self, Candidate, Findings, Wanted, told},
    whose::People,
};

/// Delay before a retry after a failure.
const AGAIN: Duration = Duration::from_secs(1);
/// How long the subscription may take to open. After that, `top` runs without it.
const LISTEN: Duration = Duration::from_secs(5);
/// After each poll the follower rests this many times as long as the poll took, to spare a server
/// with very many locks.
const REST: u32 = 4;

/// A report to the screen.
pub(super) enum News {
    Locks {
        findings: Findings,
        since_discovery: Duration,
        /// Releases per second. `None`: they cannot be counted, or this user may not subscribe.
        releases: Option<f64>,
    },
    People(People),
    /// A poll failed, for example because no server replies.
    Trouble(String),
}

/// The polling interval. `None`: paused.
pub(super) type Pace = Option<Duration>;

/// Polls until the screen is gone.
pub(super) async fn follow(
    raw: Raw<'_>,
    server: &Server,
    wanted: &Wanted,
    mut pace: watch::Receiver<Pace>,
    tell: Sender<News>,
) {
    let mut followed = Followed {
        wanted,
        raw,
        candidates: BTreeSet::new(),
        discovered: None,
        people: None,
        ears: None,
    };
    let mut is_deaf = true;
    loop {
        let began = Instant::now();
        let outcome = followed.ask(&tell).await;
        let took = began.elapsed();
        match &outcome {
            Err(error) => {
                let why = format!("{error}: this data is old; retrying");
                if tell.send(News::Trouble(why)).await.is_err() {
                    return;
                }
                (followed.ears, is_deaf) = (None, true);
            }
            Ok(_) if std::mem::take(&mut is_deaf) => {
                // only after the first results are on the screen: subscribing may take a while
                let ears = Ears::open(&followed.raw, &server.prefix);
                followed.ears = timeout(LISTEN, ears).await.ok().flatten();
            }
            // the server of the subscription is gone: subscribe again
            Ok(_) => is_deaf = followed.ears.take_if(|ears| !ears.hear()).is_some(),
        }
        // the time that was spent waiting for a timeout put no load on the servers
        let rest = if outcome.is_ok_and(|all_answer| all_answer) {
            took * REST
        } else {
            AGAIN
        };
        if tell.is_closed() {
            return;
        }
        sleep(rest).await;
        // wait for the next interval, or until polling resumes
        while pace
            .borrow_and_update()
            .is_none_or(|every| began.elapsed() < every)
        {
            let left = pace
                .borrow()
                .map_or(DISCOVER, |every| every.saturating_sub(began.elapsed()));
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
    /// When the last complete discovery ended, and how long it took.
    discovered: Option<(Instant, Duration)>,
    /// The programs behind the owners, and when they were queried.
    people: Option<(Instant, People)>,
    ears: Option<Ears>,
}

impl Followed<'_> {
    /// Polls once. Returns whether all servers replied.
    async fn ask(&mut self, tell: &Sender<News>) -> Result<bool, Failure> {
        let mut away = Away::new();
        if self
            .discovered
            .is_none_or(|(at, took)| at.elapsed() >= DISCOVER.max(took * REST))
        {
            let began = Instant::now();
            (self.candidates, away) =
                search::discover(&self.raw, self.wanted, &self.candidates).await?;
            // a server that was away is scanned as soon as it is back
            self.discovered = away.is_empty().then(|| (Instant::now(), began.elapsed()));
        }
        let heard = self.ears.as_mut().and_then(Ears::heard);
        let releases = heard.as_ref().map(|(releases, _)| *releases);
        // a waiter may have acquired a released lock: show it before the next scan of all keys
        if self.wanted.pattern.is_none() {
            self.candidates
                .extend(heard.into_iter().flat_map(|(_, again)| again));
        }
        let mut findings = search::read(&self.raw, self.wanted, &self.candidates).await;
        // CLIENT LIST is expensive for the server: send it only for an unknown owner, and rarely
        let is_due = self
            .people
            .as_ref()
            .is_none_or(|(met, people)| met.elapsed() >= DISCOVER && people.unknown.is_none());
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
        let since_discovery = self
            .discovered
            .map_or(Duration::ZERO, |(at, _)| at.elapsed());
        let _ = tell
            .send(News::Locks {
                findings,
                since_discovery,
                releases,
            })
            .await;
        Ok(all_answer)
    }

    /// Returns whether a lock has an owner whose program is not known.
    fn has_strangers(&self, findings: &Findings) -> bool {
        let is_known = |owner: &str| {
            self.people
                .as_ref()
                .is_some_and(|(_, people)| people.of(owner).is_some())
        };
        findings
            .found
            .values()
            .flat_map(|found| &found.holders)
            .any(|(owner, _)| !is_known(owner))
    }
}
