//! Which holds may be handed off, and until when.

use super::*;
use crate::{
    engine::{
        hold::{
            generation::Confirmed,
            refusal::Refusal,
            state::{AcquireMode, AcquirePlan, HoldRequest, SiblingState},
        },
        kind::{Adopts, KindInfo},
    },
    owner::{ClientId, OwnerId},
    store::Released,
};

const TTL: Duration = Duration::from_secs(30);
const MODE: AcquireMode<'_> = AcquireMode {
    about: KindInfo::plain("reentrant"),
    waits: true,
    adopts: None,
    max_holds: u32::MAX,
    after_loss: false,
    named: None,
    turn: None,
};

/// A hold of a mutex. Each ticket is for another acquire.
struct Record {
    caller: OwnerId,
    state: HoldState,
    now: Instant,
    epoch: Epoch,
    /// How many replicas have a granted record.
    had: Option<u8>,
}

impl Record {
    fn of(caller: OwnerId) -> Self {
        let now = Instant::from_millis(1_000);
        Self {
            state: HoldState::new(caller.clone(), now),
            caller,
            now,
            epoch: Epoch::FIRST,
            had: None,
        }
    }

    async fn new() -> Self {
        let client = ClientId::random();
        Self::of(OwnerId::of_one_acquire(async { OwnerId::current(&client) }).await)
    }

    fn plan(&mut self, mode: AcquireMode<'_>) -> Result<AcquirePlan, Refusal> {
        let siblings = SiblingState {
            caller: &self.caller,
            sibling: None,
            lost_sibling: None,
            suffix: 0,
            value_in_doubt: false,
        };
        self.state
            .plan(mode, siblings, self.now, &mut Effects::default())
    }

    /// Sends an acquire; the reply is yet to come.
    fn ask(&mut self, mode: AcquireMode<'_>) -> HoldRequest {
        let Ok(AcquirePlan::Send(request)) = self.plan(mode) else {
            panic!("nothing is unsettled")
        };
        self.state.send(&request, self.epoch, self.now);
        request
    }

    fn granted(&mut self, request: &HoldRequest) -> Ticket {
        let copied = Copied {
            wanted: self.had.map_or(0, u32::from),
            had: self.had,
        };
        let grant = Grant {
            copied,
            ..Grant::of(self.now, relayed_lease(TTL))
        };
        let granted = self.state.granted(
            request,
            &grant,
            self.epoch,
            self.now,
            &mut Effects::default(),
        );
        granted.unwrap().expect("its lease is not over")
    }

    /// Acquires the lock from the server.
    fn acquire(&mut self) -> Ticket {
        let request = self.ask(MODE);
        self.granted(&request)
    }

    fn hand_off(&mut self, ticket: &Ticket) -> Option<Ticket> {
        let mut effects = Effects::default();
        let next = self
            .state
            .hand_off(ticket, self.epoch, TTL, self.now, &mut effects);
        assert_eq!(self.state.wanted(), 1, "the record stays as it is");
        assert_eq!(effects.ended.is_some(), next.is_some());
        next
    }
}

/// Other clients must get their turn, however fast these tasks are.
#[tokio::test]
async fn a_series_is_over_when_the_hold_has_changed_hands_64_times() {
    let mut record = Record::new().await;
    let mut ticket = record.acquire();
    for hop in 0..64 {
        let next = record
            .hand_off(&ticket)
            .unwrap_or_else(|| panic!("hop {hop}"));
        assert!(ticket.generation.remaining().is_err(), "the giver's ended");
        assert!(next.generation.may_be_received(0, record.epoch, record.now));
        assert_eq!(ticket.generation.owner, next.generation.owner);
        ticket = next;
    }
    assert!(record.hand_off(&ticket).is_none(), "the series has no end");
    // the release goes to the server, which picks the next holder
    let state = &mut record.state;
    state
        .leave(&ticket, record.now, &mut Effects::default())
        .unwrap();
    let release = state.plan_release().expect("it is recorded");
    state.send(&release, record.epoch, record.now);
    state.released(
        &release,
        Released::Free,
        record.epoch,
        &mut Effects::default(),
    );
    state.forget_ended();
    assert!(state.current.is_none() && state.agrees());
}

#[tokio::test]
async fn a_series_is_over_2_ms_after_the_servers_reply() {
    let mut record = Record::new().await;
    let ticket = record.acquire();
    record.now = record.now + HAND_OFF_WINDOW / 2;
    // a hand-off does not renew the server's reply
    let ticket = record.hand_off(&ticket).expect("the first");
    record.now = record.now + HAND_OFF_WINDOW / 2;
    assert!(record.hand_off(&ticket).is_none(), "the series has no end");
}

/// A task may acquire again under its name, and would re-enter what it has handed off.
#[test]
fn the_hold_of_a_task_is_not_handed_off() {
    let task = OwnerId::named(&ClientId::random(), "task").unwrap();
    let mut record = Record::of(task);
    let ticket = record.acquire();
    assert!(record.hand_off(&ticket).is_none());
}

/// The giver's name is the receiver's in the record, but the giver no longer holds anything.
#[tokio::test]
async fn a_name_acquires_only_inside_the_hold_of_its_own_turn() {
    let mut record = Record::new().await;
    let first = record.acquire();
    let inside = |record: &mut Record, ticket: &Ticket| {
        let owner = ticket.generation.owner.clone();
        let named = AcquireMode {
            named: Some(&owner),
            ..MODE
        };
        match record.plan(named) {
            Ok(AcquirePlan::Send(request)) => Some(request.count),
            Err(Refusal::AcquireEnded(ended)) => {
                assert_eq!(ended, owner);
                None
            }
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(inside(&mut record, &first), Some(2));
    let second = record.hand_off(&first).expect("it is not sent");
    assert_eq!(inside(&mut record, &first), None, "two guards");
    assert_eq!(inside(&mut record, &second), Some(2));
    record
        .state
        .leave(&second, record.now, &mut Effects::default())
        .unwrap();
    assert_eq!(inside(&mut record, &second), None, "it is being released");
}

/// If the reply to an adopt request is lost, the request is sent again under the same name. The
/// first one may still arrive, and would set the lease of any later hold with that name.
#[tokio::test]
async fn what_a_late_request_may_still_touch_is_not_handed_on() {
    for is_late in [false, true] {
        let mut record = Record::new().await;
        let mode = |adopts| AcquireMode {
            adopts: Some(adopts),
            ..MODE
        };
        let mut request = record.ask(mode(Adopts::First));
        if is_late {
            record.epoch = record.epoch.next();
            let again = record.ask(mode(Adopts::Again));
            assert_eq!(again.owner, request.owner, "it is sent under the same name");
            request = again;
        }
        let ticket = record.granted(&request);
        assert_eq!(record.hand_off(&ticket).is_none(), is_late);
    }
}

/// The server may have restarted, and lost the record.
#[tokio::test]
async fn an_earlier_connections_hold_is_neither_handed_on_nor_taken() {
    let mut record = Record::new().await;
    let ticket = record.acquire();
    let next = record.hand_off(&ticket).expect("the first");
    record.epoch = record.epoch.next();
    assert!(!next.generation.may_be_received(0, record.epoch, record.now));
    assert!(record.hand_off(&next).is_none());
}

#[tokio::test]
async fn what_fewer_replicas_have_is_not_taken() {
    for (had, replicas, is_taken) in [
        (None, 0, true),
        (None, 1, false),
        (Some(1), 1, true),
        (Some(1), 2, false),
        // its renewals would need a replica that the receiver did not ask for
        (Some(1), 0, false),
    ] {
        let mut record = Record::new().await;
        record.had = had;
        let ticket = record.acquire();
        let next = record.hand_off(&ticket).expect("the first");
        let may = next
            .generation
            .may_be_received(replicas, record.epoch, record.now);
        assert_eq!(may, is_taken, "{had:?} {replicas}");
        assert_eq!(next.replicas, had);
    }
}

/// Renewals of the receiver's hold need as many replicas as it wants.
#[test]
fn what_is_renewed_with_fewer_replicas_is_not_taken() {
    let confirmed = Confirmed {
        at: Instant::now(),
        epoch: Epoch::FIRST,
        replicas: Some(2),
    };
    let owner = OwnerId::named(&ClientId::random(), "task").unwrap();
    let grant = Grant {
        copied: Copied {
            wanted: 1,
            had: Some(2),
        },
        ..Grant::of(Instant::now(), relayed_lease(TTL))
    };
    let generation = Generation::new(&owner, &grant, confirmed);
    generation.add(&grant);
    assert!(generation.may_be_received(1, Epoch::FIRST, grant.sent));
    for other in [0, 2] {
        assert!(!generation.may_be_received(other, Epoch::FIRST, grant.sent));
    }
    assert!(!generation.may_be_received(1, Epoch::FIRST, grant.sent + TTL));
}

/// A record that was extended outlives the lease that its receiver wants.
#[tokio::test]
async fn what_was_extended_is_not_handed_on() {
    let mut record = Record::new().await;
    let ticket = record.acquire();
    ticket.generation.ledger().deadline = record.now + 2 * TTL;
    assert!(record.hand_off(&ticket).is_none());
}
