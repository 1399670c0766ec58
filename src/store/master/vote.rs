//! Which master most sentinels name, as pure functions: no I/O, and the time is passed in.
//!
//! More than half of the sentinels that reply must name one address. A sentinel that has not
//! replied in this round may still name another one. One that fails drops out, but its last reply
//! counts for 5 s: otherwise one sentinel that has not heard of the failover would decide while the
//! connections to the others break for a moment. A tie lets no link connect: two sentinels that
//! disagree are no authority.

use std::{
    fmt::Write as _,
    time::{Duration, Instant},
};

use nestlock_wire::Server;

use crate::{
    error::{StoreError, StoreErrorKind},
    store::master::role::words,
};

/// How long the last reply of a silent sentinel counts. Without it, a sentinel that has not heard
/// of a failover could decide alone while the connections to the others are re-established, and
/// lead back to the old master.
const VOTE_TTL: Duration = Duration::from_secs(5);

/// A sentinel, and its last reply.
#[derive(Debug)]
pub(super) struct Voter {
    at: Server,
    /// Its last reply.
    reply: SentinelReply,
    /// The round of that reply.
    round: u64,
    /// Since when it has not replied, and why.
    failure: Option<(Instant, StoreError)>,
}

/// A sentinel's reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum SentinelReply {
    Nothing,
    /// It does not know the service.
    Unknown,
    Master(Server),
}

/// The outcome of a count.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Master(Server),
    /// Some replies are still due.
    Open,
    NoMaster,
}

impl Voter {
    pub(super) fn new(at: Server) -> Self {
        Self {
            at,
            reply: SentinelReply::Nothing,
            round: 0,
            failure: None,
        }
    }

    /// Returns the sentinel's address, and whether it replies.
    pub(super) fn answers(&self) -> (Server, bool) {
        (
            self.at.clone(),
            self.failure.is_none() && self.reply != SentinelReply::Nothing,
        )
    }

    pub(super) fn record_reply(&mut self, round: u64, word: SentinelReply) {
        (self.reply, self.round, self.failure) = (word, round, None);
    }

    pub(super) fn fails(&mut self, now: Instant, error: StoreError) {
        let since = self.failure.as_ref().map_or(now, |(since, _)| *since);
        self.failure = Some((since, error));
    }

    fn counts(&self, now: Instant) -> bool {
        self.failure.as_ref().is_none_or(|(since, _)| {
            self.reply != SentinelReply::Nothing && now < *since + VOTE_TTL
        })
    }

    fn has_replied(&self, round: u64) -> bool {
        self.failure.is_none() && self.reply != SentinelReply::Nothing && self.round >= round
    }

    /// Returns the master that it names, unless its reply in this round is still due.
    fn names(&self, round: u64) -> Option<&Server> {
        let said = self.failure.is_some() || self.has_replied(round);
        match &self.reply {
            SentinelReply::Master(at) if said => Some(at),
            _ => None,
        }
    }
}

/// Returns the server that more than half of the counted sentinels name, at least one of them in
/// this round.
pub(super) fn verdict(voters: &[Voter], round: u64, now: Instant) -> Verdict {
    let counted: Vec<&Voter> = voters.iter().filter(|voter| voter.counts(now)).collect();
    for voter in counted.iter().filter(|voter| voter.has_replied(round)) {
        let Some(at) = voter.names(round) else {
            continue;
        };
        if 2 * counted
            .iter()
            .filter(|other| other.names(round) == Some(at))
            .count()
            > counted.len()
        {
            return Verdict::Master(at.clone());
        }
    }
    let is_open = |voter: &&Voter| voter.failure.is_none() && !voter.has_replied(round);
    if counted.iter().any(is_open) {
        Verdict::Open
    } else {
        Verdict::NoMaster
    }
}

/// Returns advice for servers that do not know a command.
fn advice_on_unknown<'a>(mut errors: impl Iterator<Item = &'a StoreError>) -> &'static str {
    let is_hello = |command: &str| command.eq_ignore_ascii_case("HELLO");
    if errors.any(|error| error.command().is_some_and(is_hello)) {
        "HELLO 3 is required: use sentinels of Redis 6.2 or later, or Valkey"
    } else {
        "these are not sentinels; for a server, use redis://"
    }
}

/// Returns why there is no master, with advice.
pub(super) fn no_master_error(voters: &[Voter], service: &str) -> StoreError {
    use StoreErrorKind as K;
    let mut each = String::new();
    for Voter {
        at,
        reply: word,
        failure,
        ..
    } in voters
    {
        let _ = match (failure, word) {
            (Some((_, error)), _) => write!(each, "; {at}: {}", words(error)),
            (None, SentinelReply::Master(named)) => write!(each, "; {at} names {named}"),
            (None, SentinelReply::Unknown) => write!(each, "; {at} does not know it"),
            (None, SentinelReply::Nothing) => write!(each, "; {at} has not replied"),
        };
    }
    let failed = voters
        .iter()
        .filter_map(|voter| voter.failure.as_ref().map(|(_, error)| error));
    let all_failed = failed.clone().count() == voters.len();
    let first = failed
        .clone()
        .next()
        .map(StoreError::kind)
        .filter(|_| all_failed);
    let answers = |voter: &Voter| voter.failure.is_none() && voter.reply != SentinelReply::Nothing;
    let knows = |voter: &Voter| answers(voter) && voter.reply != SentinelReply::Unknown;
    let (kind, advice) = match first {
        _ if voters.iter().any(knows) => (
            K::Unavailable,
            "they do not agree; a later attempt may find a majority",
        ),
        _ if voters.iter().any(answers) => (
            K::Other,
            "name the service as the sentinels do: `sentinel monitor <service> ...`",
        ),
        Some(K::Auth) => (
            K::Auth,
            "set the sentinels' user and password: sentinel_login, or sentinelUsername= and sentinelPassword= in the URL",
        ),
        Some(K::NoPermission) => (
            K::NoPermission,
            "the sentinels' user needs +sentinel|get-master-addr-by-name and +subscribe",
        ),
        Some(K::UnknownCommand) => (K::Other, advice_on_unknown(failed)),
        Some(first) if failed.clone().all(|error| error.kind() == first) => {
            (first, "are they running?")
        }
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

    /// `(port, round)` names the master at this port; port 0: does not know the service; round 0:
    /// has not replied yet.
    fn voters(words: &[(u16, u64)]) -> Vec<Voter> {
        let voter = |(word, round): &(u16, u64)| {
            let mut voter = Voter::new(at(1));
            if *round > 0 {
                voter.record_reply(
                    *round,
                    if *word > 0 {
                        SentinelReply::Master(at(*word))
                    } else {
                        SentinelReply::Unknown
                    },
                );
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
        use Verdict::{Master, NoMaster, Open};
        let now = Instant::now();
        for (words, expected) in [
            (&[(7, 1), (7, 1), (8, 1)][..], Master(at(7))),
            (&[(8, 1), (7, 1), (7, 1)], Master(at(7))),
            // more than half of all, whatever the last one will say
            (&[(7, 1), (7, 1), (0, 0)], Master(at(7))),
            (&[(7, 1), (0, 0), (0, 0)], Open),
            (&[(7, 1)], Master(at(7))),
            // a tie elects no master
            (&[(7, 1), (8, 1)], NoMaster),
            (&[(7, 1), (7, 1), (8, 1), (8, 1)], NoMaster),
            (&[(7, 1), (7, 1), (8, 1), (9, 1)], NoMaster),
            // "does not know the service" is a reply, and counts
            (&[(7, 1), (0, 1), (0, 1)], NoMaster),
            (&[(7, 1), (7, 1), (0, 1)], Master(at(7))),
            (&[(0, 1), (0, 1)], NoMaster),
            (&[], NoMaster),
        ] {
            assert_eq!(verdict(&voters(words), 1, now), expected, "{words:?}");
        }
    }

    #[test]
    fn an_answer_of_an_earlier_round_does_not_count() {
        let mut voters = voters(&[(7, 1), (7, 1), (7, 1)]);
        assert_eq!(verdict(&voters, 2, Instant::now()), Verdict::Open);
        voters[0].record_reply(2, SentinelReply::Master(at(8)));
        voters[1].record_reply(3, SentinelReply::Master(at(8)));
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

    /// Otherwise a single sentinel that has not heard of the failover would lead the client back to
    /// the old master whenever the connections to the others break.
    #[test]
    fn a_lone_sentinel_does_not_overrule_a_briefly_absent_majority() {
        let now = Instant::now();
        let mut voters = voters(&[(7, 1), (8, 1), (8, 1)]);
        voters[1].fails(now, error(StoreErrorKind::Disconnected));
        // one of the two that named it still replies
        assert_eq!(verdict(&voters, 1, now), Verdict::Master(at(8)));
        voters[2].fails(now, error(StoreErrorKind::Disconnected));
        assert_eq!(verdict(&voters, 1, now), Verdict::NoMaster);
        // another failure does not extend the time
        voters[1].fails(now + VOTE_TTL / 2, error(StoreErrorKind::Disconnected));
        voters[2].fails(now + VOTE_TTL / 2, error(StoreErrorKind::Disconnected));
        assert_eq!(
            verdict(&voters, 1, now + VOTE_TTL.mul_f64(0.99)),
            Verdict::NoMaster
        );
        assert_eq!(verdict(&voters, 1, now + VOTE_TTL), Verdict::Master(at(7)));
        voters[2].record_reply(2, SentinelReply::Master(at(8)));
        assert_eq!(verdict(&voters, 1, now + VOTE_TTL), Verdict::NoMaster);
    }

    #[test]
    fn why_there_is_none_says_what_to_do() {
        use StoreErrorKind as K;
        let failed = |kind: K, text: &str| {
            let mut voters = voters(&[(0, 0), (0, 0)]);
            for voter in &mut voters {
                voter.fails(Instant::now(), StoreError::new(kind, true, text.to_owned()));
            }
            no_master_error(&voters, "my")
        };
        for (why, kind, text) in [
            (
                no_master_error(&voters(&[(0, 1), (0, 1)]), "my"),
                K::Other,
                "\"my\"; a:1 does not know it; a:1 does not",
            ),
            (
                no_master_error(&voters(&[(7, 1), (8, 1)]), "my"),
                K::Unavailable,
                "a:1 names a:7; a:1 names a:8",
            ),
            (
                failed(K::Disconnected, "refused"),
                K::Unavailable,
                "a:1: refused; a:1: refused",
            ),
            (failed(K::Auth, "WRONGPASS"), K::Auth, "sentinel_login"),
            (
                failed(K::NoPermission, "NOPERM"),
                K::NoPermission,
                "+sentinel|get-master-addr-by-name",
            ),
            (
                failed(K::UnknownCommand, "ERR unknown command 'SENTINEL'"),
                K::Other,
                "not sentinels",
            ),
            (failed(K::Timeout, "late"), K::Timeout, "late"),
        ] {
            assert_eq!(why.kind(), kind, "{why}");
            assert!(why.to_string().contains(text), "{why}");
            assert!(!why.may_have_executed());
        }
    }
}
