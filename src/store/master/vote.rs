//! Whom most sentinels name, as a value: no I/O, and the time is passed in.

use std::{
    fmt::Write as _,
    time::{Duration, Instant},
};

use fred::types::config::Server;

use super::words;
use crate::error::{StoreError, StoreErrorKind};

/// As long counts what a sentinel said that does not answer any more. Else one that knows nothing yet would decide while the
/// connections to the others are made anew: for a master that was left.
const KEPT: Duration = Duration::from_secs(5);

/// A sentinel, by what it said.
#[derive(Debug)]
pub(super) struct Voter {
    at: Server,
    /// What it said last.
    word: Word,
    /// The round that this answered.
    round: u64,
    /// Since when it does not answer, and why.
    failure: Option<(Instant, StoreError)>,
}

/// What a sentinel says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Word {
    Nothing,
    /// It does not know the service.
    Unknown,
    Master(Server),
}

/// What they say together.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Master(Server),
    /// Some have not answered yet.
    Open,
    Nobody,
}

impl Voter {
    pub(super) fn new(at: Server) -> Self {
        Self { at, word: Word::Nothing, round: 0, failure: None }
    }

    /// Who it is, and whether it answers.
    pub(super) fn answers(&self) -> (Server, bool) {
        (self.at.clone(), self.failure.is_none() && self.word != Word::Nothing)
    }

    pub(super) fn says(&mut self, round: u64, word: Word) {
        (self.word, self.round, self.failure) = (word, round, None);
    }

    pub(super) fn fails(&mut self, now: Instant, error: StoreError) {
        let since = self.failure.as_ref().map_or(now, |(since, _)| *since);
        self.failure = Some((since, error));
    }

    fn counts(&self, now: Instant) -> bool {
        self.failure.as_ref().is_none_or(|(since, _)| self.word != Word::Nothing && now < *since + KEPT)
    }

    fn has_answered(&self, round: u64) -> bool {
        self.failure.is_none() && self.word != Word::Nothing && self.round >= round
    }

    /// Whom it names, unless it has not answered yet.
    fn names(&self, round: u64) -> Option<&Server> {
        let said = self.failure.is_some() || self.has_answered(round);
        match &self.word {
            Word::Master(at) if said => Some(at),
            _ => None,
        }
    }
}

/// The server that more than half of them name, and one of those in this round.
pub(super) fn verdict(voters: &[Voter], round: u64, now: Instant) -> Verdict {
    let counted: Vec<&Voter> = voters.iter().filter(|voter| voter.counts(now)).collect();
    for voter in counted.iter().filter(|voter| voter.has_answered(round)) {
        let Some(at) = voter.names(round) else { continue };
        if 2 * counted.iter().filter(|other| other.names(round) == Some(at)).count() > counted.len() {
            return Verdict::Master(at.clone());
        }
    }
    let is_open = |voter: &&Voter| voter.failure.is_none() && !voter.has_answered(round);
    if counted.iter().any(is_open) { Verdict::Open } else { Verdict::Nobody }
}

/// Why nobody is the master.
pub(super) fn why_nobody(voters: &[Voter], service: &str) -> StoreError {
    use StoreErrorKind as K;
    let mut each = String::new();
    for Voter { at, word, failure, .. } in voters {
        let _ = match (failure, word) {
            (Some((_, error)), _) => write!(each, "; {at}: {}", words(error)),
            (None, Word::Master(named)) => write!(each, "; {at} names {named}"),
            (None, Word::Unknown) => write!(each, "; {at} does not know it"),
            (None, Word::Nothing) => write!(each, "; {at} has not answered"),
        };
    }
    let failed = voters.iter().filter_map(|voter| voter.failure.as_ref().map(|(_, error)| error));
    let all_failed = failed.clone().count() == voters.len();
    let first = failed.clone().next().map(StoreError::kind).filter(|_| all_failed);
    let answers = |voter: &Voter| voter.failure.is_none() && voter.word != Word::Nothing;
    let knows = |voter: &Voter| answers(voter) && voter.word != Word::Unknown;
    let (kind, advice) = match first {
        _ if voters.iter().any(knows) => (K::Unavailable, "they do not agree; it is asked again"),
        _ if voters.iter().any(answers) => {
            (K::Other, "name the service as the sentinels do: `sentinel monitor <service> ...`")
        }
        Some(K::Auth) => (
            K::Auth,
            "give the sentinels' user and password: sentinel_login, or sentinelUsername= and sentinelPassword= in the URL",
        ),
        Some(K::NoPermission) => {
            (K::NoPermission, "the sentinels' user needs +sentinel|get-master-addr-by-name and +subscribe")
        }
        Some(K::UnknownCommand) => (K::Other, "these are no sentinels; for a server, use redis://"),
        Some(first) if failed.clone().all(|error| error.kind() == first) => (first, "are they running?"),
        _ => (K::Unavailable, "are they running?"),
    };
    let why = format!("no master of the service {service:?}{each}; {advice}");
    StoreError::new(kind, false, why).before_any_request()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(port: u16) -> Server {
        Server::new("a", port)
    }

    /// `(0, round)`: knows nothing; `(port, round)`; round 0: has not answered yet.
    fn voters(words: &[(u16, u64)]) -> Vec<Voter> {
        let voter = |(word, round): &(u16, u64)| {
            let mut voter = Voter::new(at(1));
            if *round > 0 {
                voter.says(*round, if *word > 0 { Word::Master(at(*word)) } else { Word::Unknown });
            }
            voter
        };
        words.iter().map(voter).collect()
    }

    fn error(kind: StoreErrorKind) -> StoreError {
        StoreError::new(kind, true, "why")
    }

    #[test]
    fn most_of_those_that_answer_name_the_master() {
        use Verdict::{Master, Nobody, Open};
        let now = Instant::now();
        for (words, expected) in [
            (&[(7, 1), (7, 1), (8, 1)][..], Master(at(7))),
            (&[(8, 1), (7, 1), (7, 1)], Master(at(7))),
            // most of all, whatever the last one will say
            (&[(7, 1), (7, 1), (0, 0)], Master(at(7))),
            (&[(7, 1), (0, 0), (0, 0)], Open),
            (&[(7, 1)], Master(at(7))),
            // a tie changes nothing
            (&[(7, 1), (8, 1)], Nobody),
            (&[(7, 1), (7, 1), (8, 1), (8, 1)], Nobody),
            (&[(7, 1), (7, 1), (8, 1), (9, 1)], Nobody),
            // who does not know the service has answered
            (&[(7, 1), (0, 1), (0, 1)], Nobody),
            (&[(7, 1), (7, 1), (0, 1)], Master(at(7))),
            (&[(0, 1), (0, 1)], Nobody),
            (&[], Nobody),
        ] {
            assert_eq!(verdict(&voters(words), 1, now), expected, "{words:?}");
        }
    }

    #[test]
    fn an_answer_of_an_earlier_round_does_not_count() {
        let mut voters = voters(&[(7, 1), (7, 1), (7, 1)]);
        assert_eq!(verdict(&voters, 2, Instant::now()), Verdict::Open);
        voters[0].says(2, Word::Master(at(8)));
        voters[1].says(3, Word::Master(at(8)));
        assert_eq!(verdict(&voters, 2, Instant::now()), Verdict::Master(at(8)));
    }

    #[test]
    fn one_that_never_answered_is_not_waited_for() {
        let now = Instant::now();
        let mut voters = voters(&[(7, 1), (0, 0), (0, 0)]);
        voters[1].fails(now, error(StoreErrorKind::Disconnected));
        assert_eq!(verdict(&voters, 1, now), Verdict::Open);
        voters[2].fails(now, error(StoreErrorKind::Timeout));
        assert_eq!(verdict(&voters, 1, now), Verdict::Master(at(7)));
    }

    /// Else one sentinel that has not heard of the failover yet would lead us back to the old master whenever the
    /// connections to the others break.
    #[test]
    fn what_most_said_is_not_overruled_by_one_while_they_are_away_for_a_moment() {
        let now = Instant::now();
        let mut voters = voters(&[(7, 1), (8, 1), (8, 1)]);
        voters[1].fails(now, error(StoreErrorKind::Disconnected));
        // one of those who named it is here
        assert_eq!(verdict(&voters, 1, now), Verdict::Master(at(8)));
        voters[2].fails(now, error(StoreErrorKind::Disconnected));
        assert_eq!(verdict(&voters, 1, now), Verdict::Nobody);
        // failing again does not make it last longer
        voters[1].fails(now + KEPT / 2, error(StoreErrorKind::Disconnected));
        voters[2].fails(now + KEPT / 2, error(StoreErrorKind::Disconnected));
        assert_eq!(verdict(&voters, 1, now + KEPT.mul_f64(0.99)), Verdict::Nobody);
        assert_eq!(verdict(&voters, 1, now + KEPT), Verdict::Master(at(7)));
        voters[2].says(2, Word::Master(at(8)));
        assert_eq!(verdict(&voters, 1, now + KEPT), Verdict::Nobody);
    }

    #[test]
    fn why_there_is_none_says_what_to_do() {
        use StoreErrorKind as K;
        let failed = |kind: K, text: &str| {
            let mut voters = voters(&[(0, 0), (0, 0)]);
            for voter in &mut voters {
                voter.fails(Instant::now(), StoreError::new(kind, true, text.to_owned()));
            }
            why_nobody(&voters, "my")
        };
        for (why, kind, text) in [
            (why_nobody(&voters(&[(0, 1), (0, 1)]), "my"), K::Other, "\"my\"; a:1 does not know it; a:1 does not"),
            (why_nobody(&voters(&[(7, 1), (8, 1)]), "my"), K::Unavailable, "a:1 names a:7; a:1 names a:8"),
            (failed(K::Disconnected, "refused"), K::Unavailable, "a:1: refused; a:1: refused"),
            (failed(K::Auth, "WRONGPASS"), K::Auth, "sentinel_login"),
            (failed(K::NoPermission, "NOPERM"), K::NoPermission, "+sentinel|get-master-addr-by-name"),
            (failed(K::UnknownCommand, "ERR unknown command 'SENTINEL'"), K::Other, "no sentinels"),
            (failed(K::Timeout, "late"), K::Timeout, "late"),
        ] {
            assert_eq!(why.kind(), kind, "{why}");
            assert!(why.to_string().contains(text), "{why}");
            assert!(!why.may_have_executed());
        }
    }
}
