//! Model checking of a hold's state: every order of events within bounds, with the shipped
//! transitions and scripts. A failure shows the shortest path to a broken rule.

use std::{sync::Arc, time::Instant as RealTime};

use nestlock_wire::Epoch;
use stateright::{Checker, HasDiscoveries, Model, Property};

use self::{
    client::{To, is_valid},
    world::{Budget, TICK, TICK_OF_SERVER, World, number},
};
use super::server::Verb;

mod answers;
mod client;
mod rules;
mod world;

/// An event. It concerns the first client unless its name says otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Acquire {
        after_loss: bool,
    },
    /// A guard hands its hold off to another acquire.
    HandOff {
        hold: usize,
        guard: usize,
    },
    /// A guard is given up, by a call of `unlock` or by a drop.
    Leave {
        hold: usize,
        guard: usize,
        awaited: bool,
    },
    /// A call of `unlock` gets the owner lock.
    Unlock {
        hold: usize,
        which: usize,
    },
    /// The janitor gets the owner lock.
    Settle(usize),
    /// The watchdog polls the hold.
    Look(usize),
    /// The janitor releases an abandoned name.
    Bust,
    /// The server executes the oldest request of a connection.
    Execute(Epoch),
    /// The server refuses the oldest request of the current connection.
    Refuse,
    /// The client reads the oldest reply.
    Hear,
    /// The future that has the owner lock is dropped.
    Cancel(usize),
    /// The future that has the owner lock has waited too long.
    TimeOut(usize),
    Cut,
    Pass,
    /// Another client deletes the record.
    Delete,
    OtherAcquires,
    OtherLeaves,
}

/// The name of the checked property.
const STANDS: &str = "every rule stands";

struct Holding {
    budget: Budget,
    max_holds: u32,
}

impl Model for Holding {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(self.budget, self.max_holds)]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        if world.wrong.is_none() {
            world.actions(actions);
        }
    }

    fn next_state(&self, world: &World, action: Action) -> Option<World> {
        world.next(action)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![Property::always(STANDS, |_, world: &World| {
            world.wrong.or_else(|| world.broken()).is_none()
        })]
    }
}

impl World {
    fn actions(&self, actions: &mut Vec<Action>) {
        let [one, other] = &self.clients;
        let budget = &self.budget;
        actions.extend(
            one.sent
                .first()
                .map(|(sent, _)| Action::Execute(sent.epoch)),
        );
        let newer = one
            .sent
            .iter()
            .map(|(sent, _)| sent.epoch)
            .filter(|epoch| *epoch != one.sent[0].0.epoch);
        let mut newer: Vec<Epoch> = newer.collect();
        newer.dedup();
        actions.extend(newer.into_iter().map(Action::Execute));
        if budget.refusals > 0 && one.sent.iter().any(|(sent, _)| sent.epoch == one.epoch) {
            actions.push(Action::Refuse);
        }
        if !one.answers.is_empty() {
            actions.push(Action::Hear);
        }
        for (at, hold) in one.holds.iter().enumerate() {
            for guard in 0..hold.guards.len() {
                let can = budget.hand_offs > 0 && hold.turn.is_none();
                actions.extend(can.then_some(Action::HandOff { hold: at, guard }));
                actions.extend([true, false].map(|awaited| Action::Leave {
                    hold: at,
                    guard,
                    awaited,
                }));
            }
            if hold.turn.is_none() {
                actions.extend(
                    (0..hold.unlocks.len()).map(|which| Action::Unlock { hold: at, which }),
                );
                actions.push(Action::Settle(at));
            } else {
                actions.extend((budget.cancels > 0).then_some(Action::Cancel(at)));
                actions.extend((budget.timeouts > 0).then_some(Action::TimeOut(at)));
            }
            actions.push(Action::Look(at));
        }
        let may_acquire = |at: usize| {
            one.holds[at].turn.is_none() && one.holds[at].state.wanted() < one.max_holds
        };
        if budget.acquires > 0 && one.registered().is_none_or(may_acquire) {
            actions.push(Action::Acquire { after_loss: false });
            if one
                .registered()
                .is_some_and(|at| one.holds[at].state.lost_inside(self.now).is_some())
            {
                actions.push(Action::Acquire { after_loss: true });
            }
        }
        if !one.ghosts.is_empty() {
            actions.push(Action::Bust);
        }
        actions.extend((budget.cuts > 0).then_some(Action::Cut));
        actions.push(Action::Pass);
        let ours = self
            .server
            .record
            .as_ref()
            .is_some_and(|record| record.owner.contains("/one"));
        actions.extend((budget.deletes > 0 && ours).then_some(Action::Delete));
        actions.push(if other.holds.is_empty() {
            Action::OtherAcquires
        } else {
            Action::OtherLeaves
        });
    }

    /// Returns the world after an action. Returns `None` if nothing would happen.
    fn next(&self, action: Action) -> Option<Self> {
        let mut next = self.clone();
        let guards = |world: &Self| -> Vec<_> {
            let holds = world.clients.iter().flat_map(|client| &client.holds);
            holds
                .flat_map(|hold| &hold.guards)
                .map(|guard| Arc::clone(&guard.generation))
                .collect()
        };
        let before: Vec<_> = guards(&next)
            .into_iter()
            .map(|generation| {
                let (valid, end) = (is_valid(&generation, next.now), generation.ledger().end);
                (valid, end, generation)
            })
            .collect();
        next.apply(action).then(|| {
            next.hear_of();
            next.check_ends(&before);
            next
        })
    }

    fn apply(&mut self, action: Action) -> bool {
        let now = self.now;
        let [one, other] = &mut self.clients;
        match action {
            Action::Acquire { after_loss } => {
                self.budget.acquires -= 1;
                one.acquire(after_loss, now);
            }
            Action::HandOff { hold, guard } => {
                self.budget.hand_offs -= 1;
                return one.hand_off(hold, guard, now);
            }
            Action::Leave {
                hold,
                guard,
                awaited,
            } => one.leave(hold, guard, awaited, now),
            Action::Unlock { hold, which } => one.unlock(hold, which, now),
            Action::Settle(hold) => return one.settle(hold, now),
            Action::Look(hold) => return self.look(hold),
            Action::Bust => one.bust(),
            Action::Execute(epoch) => self.execute(0, epoch),
            Action::Refuse => {
                self.budget.refusals -= 1;
                let at = one
                    .sent
                    .iter()
                    .position(|(sent, _)| sent.epoch == one.epoch)
                    .unwrap();
                let (_, to) = one.sent.remove(at);
                one.answers.push((None, to));
            }
            Action::Hear => one.hear(now),
            Action::Cancel(hold) => {
                self.budget.cancels -= 1;
                self.history
                    .doubted
                    .insert(number(&one.holds[hold].state.owner));
                one.cancel(hold);
            }
            Action::TimeOut(hold) => {
                self.budget.timeouts -= 1;
                self.history
                    .doubted
                    .insert(number(&one.holds[hold].state.owner));
                one.silent(hold, now);
            }
            Action::Cut => {
                self.budget.cuts -= 1;
                let unheard = one.holds.iter().filter(|hold| hold.turn.is_some());
                self.history
                    .doubted
                    .extend(unheard.map(|hold| number(&hold.state.owner)));
                one.cut(now);
            }
            Action::Pass => {
                self.now = now + TICK;
                self.server.pass(TICK_OF_SERVER);
            }
            Action::Delete => {
                self.budget.deletes -= 1;
                self.server.record = None;
                self.history.tampered = true;
            }
            Action::OtherAcquires => {
                other.acquire(false, now);
                self.other_goes_on();
            }
            Action::OtherLeaves => {
                other.leave(0, 0, true, now);
                match other.holds.first() {
                    Some(hold) if hold.unlocks.is_empty() => _ = other.settle(0, now),
                    Some(_) => other.unlock(0, 0, now),
                    None => {}
                }
                self.other_goes_on();
            }
        }
        true
    }

    fn look(&mut self, hold: usize) -> bool {
        let one = &mut self.clients[0];
        let (names, requests, name) = (
            one.suffix,
            one.sent.len(),
            number(&one.holds[hold].state.owner),
        );
        let looked = one.look(hold, self.now);
        let (orphans, renewals) = (
            u8::from(one.suffix > names),
            u8::from(one.sent.len() > requests),
        );
        let fits = self.budget.orphans >= orphans && self.budget.renewals >= renewals;
        if looked && fits {
            self.history.doubted.extend((orphans > 0).then_some(name));
            self.budget.orphans -= orphans;
            self.budget.renewals -= renewals;
        }
        looked && fits
    }

    fn other_goes_on(&mut self) {
        while !self.clients[1].sent.is_empty() {
            self.execute(1, Epoch::FIRST);
            self.clients[1].hear(self.now);
        }
    }

    fn execute(&mut self, client: usize, epoch: Epoch) {
        let faults = client == 0;
        let client = &mut self.clients[client];
        let at = client
            .sent
            .iter()
            .position(|(sent, _)| sent.epoch == epoch)
            .unwrap();
        let (sent, to) = client.sent.remove(at);
        let (before, record) = (self.server.count(&sent.owner), self.server.record.clone());
        let answer = self.server.execute(&sent);
        if epoch == client.epoch {
            client.answers.push((Some(answer), to.clone()));
        }
        self.check_answer(&sent, answer, record.as_ref());
        if !faults {
            return;
        }
        let (history, name) = (&mut self.history, number(&sent.owner));
        history
            .released
            .extend((sent.verb == Verb::Release { holds: 0 }).then_some(name));
        match sent.verb {
            Verb::Acquire { holds } => {
                let unheard = matches!(to, To::Unawaited);
                history.blurred = before.is_some() && (history.blurred || holds > 1 && unheard);
                history.tampered &= before.is_some() || unheard || holds > 1;
                history
                    .missed
                    .extend((holds > 1 && before.is_none()).then_some(name));
            }
            Verb::Release { .. } if before.is_some() => _ = history.missed.remove(&name),
            Verb::Release { .. } => _ = history.missed.insert(name),
            Verb::Renew { .. } => {}
        }
    }
}

// --- the bounds ---

const TWO: Budget = Budget {
    acquires: 2,
    cuts: 0,
    cancels: 0,
    timeouts: 0,
    refusals: 0,
    deletes: 0,
    orphans: 0,
    renewals: 0,
    hand_offs: 0,
};

/// Visits every reachable state. `max_holds`: the highest hold count of the first client.
fn explore(budget: Budget, max_holds: u32) {
    let from = RealTime::now();
    let checker = Holding { budget, max_holds }
        .checker()
        .finish_when(HasDiscoveries::Any)
        .spawn_bfs()
        .join();
    if let Some(path) = checker.discovery(STANDS) {
        let broken = path
            .last_state()
            .wrong
            .or_else(|| path.last_state().broken())
            .expect("a rule");
        let (states, actions) = (checker.unique_state_count(), path.into_actions());
        panic!(
            "{budget:?}, {max_holds}: {broken:?} is broken in {} steps, {states} states: {actions:?}",
            actions.len()
        );
    }
    let (states, steps, took) = (
        checker.unique_state_count(),
        checker.state_count(),
        from.elapsed(),
    );
    println!(
        "{budget:?}, {max_holds}: {states} states, {steps} steps, depth {}, {took:.1?}",
        checker.max_depth()
    );
}

/// Plays the actions in this order and checks the rules after each one.
fn play(actions: &[Action], max_holds: u32) {
    let all = u8::MAX;
    let budget = Budget {
        acquires: all,
        cuts: all,
        cancels: all,
        timeouts: all,
        refusals: all,
        deletes: all,
        orphans: all,
        renewals: all,
        hand_offs: all,
    };
    let mut world = World::new(budget, max_holds);
    for action in actions {
        world = world
            .next(*action)
            .unwrap_or_else(|| panic!("nothing comes of {action:?}: {world:#?}"));
        assert_eq!(
            world.wrong.or_else(|| world.broken()),
            None,
            "after {action:?}"
        );
    }
}

#[test]
fn whatever_a_cut_leaves_behind_the_rules_stand() {
    explore(Budget { cuts: 1, ..TWO }, 1);
}

#[test]
fn whatever_a_dropped_future_leaves_behind_the_rules_stand() {
    explore(Budget { cancels: 1, ..TWO }, 1);
}

#[test]
fn whatever_gets_no_reply_in_time_the_rules_stand() {
    explore(Budget { timeouts: 1, ..TWO }, 1);
}

#[test]
fn whatever_the_server_refuses_the_rules_stand() {
    explore(Budget { refusals: 1, ..TWO }, 1);
}

#[test]
fn whatever_an_unpolled_future_has_sent_the_rules_stand() {
    explore(Budget { orphans: 1, ..TWO }, 1);
}

#[test]
fn whenever_it_is_renewed_the_rules_stand() {
    explore(Budget { renewals: 1, ..TWO }, 1);
}

#[test]
fn whenever_another_client_deletes_the_record_the_rules_stand() {
    explore(Budget { deletes: 1, ..TWO }, 2);
}

#[test]
fn whichever_acquire_it_is_handed_off_to_the_rules_stand() {
    explore(
        Budget {
            acquires: 1,
            hand_offs: 2,
            ..TWO
        },
        1,
    );
    explore(
        Budget {
            hand_offs: 1,
            ..TWO
        },
        1,
    );
    explore(
        Budget {
            acquires: 1,
            hand_offs: 1,
            cuts: 1,
            ..TWO
        },
        1,
    );
}

#[test]
#[ignore = "takes some minutes"]
fn whatever_happens_where_it_is_handed_on_the_rules_stand() {
    explore(
        Budget {
            hand_offs: 2,
            ..TWO
        },
        2,
    );
    explore(
        Budget {
            hand_offs: 1,
            cuts: 1,
            ..TWO
        },
        1,
    );
    explore(
        Budget {
            hand_offs: 1,
            cancels: 1,
            ..TWO
        },
        1,
    );
    explore(
        Budget {
            hand_offs: 1,
            timeouts: 1,
            ..TWO
        },
        1,
    );
    explore(
        Budget {
            hand_offs: 1,
            orphans: 1,
            ..TWO
        },
        1,
    );
    explore(
        Budget {
            hand_offs: 1,
            renewals: 1,
            ..TWO
        },
        2,
    );
    explore(
        Budget {
            hand_offs: 1,
            deletes: 1,
            ..TWO
        },
        2,
    );
}

/// The rules stand whatever happens inside another hold or happens twice.
#[test]
#[ignore = "takes some minutes"]
fn the_rules_stand_whatever_happens_in_a_nested_hold_or_twice() {
    explore(Budget { cuts: 1, ..TWO }, 2);
    explore(Budget { cancels: 1, ..TWO }, 2);
    explore(Budget { timeouts: 1, ..TWO }, 2);
    explore(Budget { refusals: 1, ..TWO }, 2);
    explore(Budget { orphans: 1, ..TWO }, 2);
    explore(Budget { renewals: 1, ..TWO }, 2);
    explore(Budget { acquires: 3, ..TWO }, 3);
    explore(
        Budget {
            deletes: 1,
            renewals: 1,
            ..TWO
        },
        2,
    );
    explore(
        Budget {
            cuts: 1,
            orphans: 1,
            ..TWO
        },
        1,
    );
    explore(
        Budget {
            cuts: 1,
            renewals: 1,
            ..TWO
        },
        1,
    );
    explore(Budget { cuts: 2, ..TWO }, 1);
}

/// One task joins an unlock and a nested acquire. The record was gone before the outer hold was
/// given up, and the reply to the nested request shows that.
#[test]
fn an_unlock_reports_the_record_a_nested_acquire_found_gone() {
    let (acquire, execute) = (
        Action::Acquire { after_loss: false },
        Action::Execute(Epoch::FIRST),
    );
    let leave = Action::Leave {
        hold: 0,
        guard: 0,
        awaited: true,
    };
    let unlock = Action::Unlock { hold: 0, which: 0 };
    play(
        &[
            acquire,
            execute,
            Action::Hear,
            acquire,
            Action::Delete,
            leave,
            execute,
            Action::Hear,
            unlock,
        ],
        2,
    );
}
