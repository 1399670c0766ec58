//! Two clients and one server, and which parts of them the checker compares.

use std::{
    collections::BTreeSet,
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
    time::Duration,
};

use nestlock_wire::clock::Instant;

use super::{
    super::server::{OVERDUE, Server, TTL},
    client::{Client, Hold, Renewal, To, Turn, Wants},
};

use crate::{
    engine::hold::{
        generation::{Confirmed, Generation},
        hand_off::HAND_OFF_WINDOW,
        state::{HoldRequest, HoldState, ServerSide},
    },
    owner::OwnerId,
    store::tests::scripts::GRAIN,
};

/// How often each event may happen to the first client.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(super) struct Budget {
    pub(super) acquires: u8,
    pub(super) cuts: u8,
    /// Dropped futures.
    pub(super) cancels: u8,
    /// Command timeouts.
    pub(super) timeouts: u8,
    pub(super) refusals: u8,
    pub(super) deletes: u8,
    pub(super) orphans: u8,
    pub(super) renewals: u8,
    pub(super) hand_offs: u8,
}

#[derive(Debug)]
pub(super) struct World {
    pub(super) now: Instant,
    pub(super) server: Server,
    /// The first client meets faults. The second acquires and releases whenever it can do so at
    /// once.
    pub(super) clients: [Client; 2],
    pub(super) budget: Budget,
    pub(super) history: History,
    /// The first broken rule.
    pub(super) wrong: Option<&'static str>,
}

/// What the rules must know of the past.
#[derive(Debug, Clone, Default, Hash)]
pub(super) struct History {
    /// Another client deleted the record of what the first client holds.
    pub(super) tampered: bool,
    /// A nested acquire was executed whose reply no future awaits: the record's count may be too
    /// high.
    pub(super) blurred: bool,
    /// Names whose last release, or last nested acquire, found no record.
    pub(super) missed: BTreeSet<u64>,
    /// Names whose full release was executed since they were last acquired.
    pub(super) released: BTreeSet<u64>,
    /// Names with a request of unknown outcome.
    pub(super) doubted: BTreeSet<u64>,
}

/// Returns the suffix of a name, or 0 if it has none.
pub(super) fn number(owner: &OwnerId) -> u64 {
    owner
        .as_str()
        .rsplit_once('.')
        .map_or(0, |(_, number)| number.parse().unwrap())
}

impl World {
    pub(super) fn new(budget: Budget, max_holds: u32) -> Self {
        let owner = |name| {
            format!("00000000-0000-0000-0000-000000000000:x/{name}")
                .parse::<OwnerId>()
                .unwrap()
        };
        // Only a hold of a mutex is handed off: its owner is that of one acquire.
        let one = match budget.hand_offs {
            0 => owner("one"),
            _ => owner("one").next_turn(),
        };
        Self {
            now: Instant::from_millis(TTL.as_millis() as u64),
            server: Server::default(),
            clients: [
                Client::new(&one, max_holds),
                Client::new(&owner("other"), 1),
            ],
            budget,
            history: History::default(),
            wrong: None,
        }
    }
}

// --- as a value ---

/// Generations and their copies, in the order in which they were found.
#[derive(Default)]
struct Met(Vec<(Arc<Generation>, Arc<Generation>)>);

impl Met {
    fn position(&self, generation: &Arc<Generation>) -> Option<usize> {
        self.0
            .iter()
            .position(|(known, _)| Arc::ptr_eq(known, generation))
    }

    fn copy(&mut self, generation: &Arc<Generation>) -> Arc<Generation> {
        let at = self.position(generation).unwrap_or_else(|| {
            self.0.push((Arc::clone(generation), generation.copied()));
            self.0.len() - 1
        });
        Arc::clone(&self.0[at].1)
    }

    fn copy_wants(&mut self, wants: &Wants) -> Wants {
        match wants {
            Wants::Unlock(generation) => Wants::Unlock(self.copy(generation)),
            Wants::Acquire { .. } | Wants::Settle => wants.clone(),
        }
    }

    fn copy_to(&mut self, to: &To) -> To {
        match to {
            To::Watchdog(at, renewal) => To::Watchdog(
                *at,
                Renewal {
                    generation: self.copy(&renewal.generation),
                    ..renewal.clone()
                },
            ),
            To::Unawaited | To::Turn(_) => to.clone(),
        }
    }

    fn copy_state(&mut self, state: &HoldState) -> HoldState {
        let current = state.current.as_ref().map(|current| self.copy(current));
        // Name each field, so that the compiler finds one that is forgotten.
        let HoldState {
            ownership: standing,
            owner,
            waiters,
            sibling_in_doubt,
            is_left,
            server,
            to_be_checked,
            moves_to,
            late_request: late,
            last_sent: asked,
            ends,
            current: _,
        } = state;
        HoldState {
            ownership: *standing,
            owner: owner.clone(),
            waiters: *waiters,
            sibling_in_doubt: *sibling_in_doubt,
            is_left: *is_left,
            server: *server,
            to_be_checked: *to_be_checked,
            moves_to: moves_to.clone(),
            late_request: *late,
            last_sent: *asked,
            ends: *ends,
            current,
        }
    }

    fn copy_hold(&mut self, hold: &Hold) -> Hold {
        let turn = hold.turn.as_ref().map(|turn| {
            let HoldRequest {
                owner,
                count,
                before,
                is_release,
            } = &turn.request;
            let request = HoldRequest {
                owner: owner.clone(),
                count: *count,
                before: *before,
                is_release: *is_release,
            };
            Turn {
                request,
                sent: turn.sent,
                wants: self.copy_wants(&turn.wants),
            }
        });
        Hold {
            caller: hold.caller.clone(),
            state: self.copy_state(&hold.state),
            registered: hold.registered,
            turn,
            newest: hold.newest.as_ref().map(|newest| self.copy(newest)),
            guards: hold
                .guards
                .iter()
                .map(|guard| guard.copied_to(self.copy(&guard.generation)))
                .collect(),
            unlocks: hold
                .unlocks
                .iter()
                .map(|generation| self.copy(generation))
                .collect(),
        }
    }

    fn copy_client(&mut self, client: &Client) -> Client {
        Client {
            owner: client.owner.clone(),
            max_holds: client.max_holds,
            holds: client
                .holds
                .iter()
                .map(|hold| self.copy_hold(hold))
                .collect(),
            suffix: client.suffix,
            epoch: client.epoch,
            sent: client
                .sent
                .iter()
                .map(|(sent, to)| (sent.clone(), self.copy_to(to)))
                .collect(),
            answers: client
                .answers
                .iter()
                .map(|(answer, to)| (*answer, self.copy_to(to)))
                .collect(),
            ghosts: client.ghosts.clone(),
            told: Vec::new(),
        }
    }
}

impl Clone for World {
    fn clone(&self) -> Self {
        let mut met = Met::default();
        Self {
            now: self.now,
            server: self.server.clone(),
            clients: [0, 1].map(|at| met.copy_client(&self.clients[at])),
            budget: self.budget,
            history: self.history.clone(),
            wrong: self.wrong,
        }
    }
}

/// Hashes what may make a difference from here on. Instants are relative to now, and all past
/// instants are equal.
struct Compared<'a, H> {
    hasher: &'a mut H,
    now: Instant,
    met: Met,
}

impl<H: Hasher> Compared<'_, H> {
    fn value(&mut self, value: impl Hash) {
        value.hash(self.hasher);
    }

    fn instant(&mut self, at: Instant) {
        self.value(at.saturating_duration_since(self.now));
    }

    /// Hashes when a request for a lease was sent, as the instant at which that lease ends.
    fn sent(&mut self, at: Instant) {
        self.instant(at + TTL);
    }

    fn owner(&mut self, owner: &OwnerId) {
        self.value((number(owner), owner.turn()));
    }

    fn generation(&mut self, generation: &Arc<Generation>) {
        let known = self.met.position(generation);
        self.value(known);
        if known.is_none() {
            self.met
                .0
                .push((Arc::clone(generation), Arc::clone(generation)));
            self.owner(&generation.owner);
            self.confirmed(generation.confirmed);
            let now = self.now;
            generation.ledger().hash_by(self.hasher, |hasher, at| {
                at.saturating_duration_since(now).hash(hasher);
            });
        }
    }

    fn confirmed(&mut self, confirmed: Confirmed) {
        self.value(confirmed.epoch);
        self.instant(confirmed.at + HAND_OFF_WINDOW);
    }

    fn to(&mut self, to: &To) {
        self.value(std::mem::discriminant(to));
        match to {
            To::Unawaited => {}
            To::Turn(at) => self.value(at),
            To::Watchdog(
                at,
                Renewal {
                    generation,
                    sent,
                    lease,
                    period,
                },
            ) => {
                self.value((at, lease, period));
                self.sent(*sent);
                self.generation(generation);
            }
        }
    }

    fn server_side(&mut self, server: ServerSide) {
        match server {
            ServerSide::Holds(count) => self.value((0, count)),
            ServerSide::Waits => self.value(1),
            ServerSide::InDoubt { epoch, outermost } => self.value((2, epoch, outermost)),
        }
    }

    fn state(&mut self, state: &HoldState) {
        let HoldState {
            ownership: standing,
            owner,
            waiters,
            sibling_in_doubt,
            is_left,
            server,
            to_be_checked,
            moves_to,
            late_request: late,
            last_sent: asked,
            ends,
            current,
        } = state;
        self.value((
            *standing as u8,
            waiters,
            sibling_in_doubt,
            (is_left, to_be_checked),
            late.map(|late| late.epoch),
            current.is_some(),
        ));
        if let Some(owner) = moves_to {
            self.owner(owner);
        }
        self.owner(owner);
        self.server_side(*server);
        let late_until = late.map(|late| late.until);
        for at in [*asked + OVERDUE, *ends].into_iter().chain(late_until) {
            self.instant(at);
        }
        if let Some(current) = current {
            self.generation(current);
        }
    }

    fn hold(&mut self, hold: &Hold) {
        self.state(&hold.state);
        self.value(hold.caller.as_str());
        self.value((
            hold.registered,
            hold.guards.len(),
            hold.unlocks.len(),
            hold.turn.is_some(),
        ));
        for guard in &hold.guards {
            guard.hash_own(self.hasher);
            self.generation(&guard.generation);
        }
        hold.newest
            .iter()
            .chain(&hold.unlocks)
            .for_each(|generation| self.generation(generation));
        if let Some(Turn {
            request,
            sent,
            wants,
        }) = &hold.turn
        {
            self.owner(&request.owner);
            self.value((request.count, request.is_release));
            self.server_side(request.before);
            self.sent(*sent);
            self.value(std::mem::discriminant(wants));
            match wants {
                Wants::Acquire { after_loss } => self.value(after_loss),
                Wants::Unlock(generation) => self.generation(generation),
                Wants::Settle => {}
            }
        }
    }

    fn client(&mut self, client: &Client) {
        let lengths = (
            client.holds.len(),
            client.sent.len(),
            client.answers.len(),
            client.ghosts.len(),
        );
        self.value((client.suffix, client.epoch, lengths));
        client.holds.iter().for_each(|hold| self.hold(hold));
        for (sent, to) in &client.sent {
            self.owner(&sent.owner);
            self.value((sent.verb, sent.epoch));
            self.to(to);
        }
        for (answer, to) in &client.answers {
            self.value(answer);
            self.to(to);
        }
        client.ghosts.iter().for_each(|ghost| self.owner(ghost));
    }
}

impl Hash for World {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        let mut compared = Compared {
            hasher,
            now: self.now,
            met: Met::default(),
        };
        compared.value((&self.server.record, self.budget, &self.history, self.wrong));
        self.clients
            .iter()
            .for_each(|client| compared.client(client));
    }
}

/// Compares by the hash, as the checker does.
impl PartialEq for World {
    fn eq(&self, other: &Self) -> bool {
        let hash = |world: &Self| {
            let mut hasher = DefaultHasher::new();
            world.hash(&mut hasher);
            hasher.finish()
        };
        hash(self) == hash(other)
    }
}

/// A little less than a third of a lease. 3 ticks end within the drift allowance, before the lease
/// does. On the server, whose clock is 0.6 % fast, they exceed the lease.
pub(super) const TICK: Duration = GRAIN.saturating_mul(3_315);
pub(super) const TICK_OF_SERVER: Duration = GRAIN.saturating_mul(3_335);
