//! Which holds may be handed off, and for how long.

use super::*;
use crate::{
    engine::{
        kind::{Adopts, KindInfo},
        state::{AcquireMode, AcquirePlan, SiblingState},
    },
    keys::LockName,
    lock::Reentrant,
    owner::ClientId,
};

const TTL: Duration = Duration::from_secs(30);
const MODE: AcquireMode = AcquireMode {
    about: KindInfo::plain("reentrant"),
    waits: true,
    adopts: None,
    max_holds: u32::MAX,
    after_loss: false,
};

/// Tasks of one client at one lock, each under its own name.
struct Tasks {
    kind: Arc<dyn Kind>,
    states: Vec<(OwnerId, HoldState)>,
    /// How many names were retired.
    suffix: u64,
    now: Instant,
    epoch: Epoch,
    /// How many replicas have a granted record.
    had: Option<u8>,
    /// How many replicas the taker requires.
    replicas: u32,
}

impl Tasks {
    fn new(tasks: usize) -> Self {
        let (client, now) = (ClientId::random(), Instant::from_millis(1_000));
        let state = |task| {
            let owner = OwnerId::named(&client, &format!("task-{task}")).unwrap();
            (owner.clone(), HoldState::new(owner, now))
        };
        let states = (0..tasks).map(state).collect();
        let kind = Arc::new(Reentrant::new(&LockName::new("", "l", 1024).unwrap()));
        Self {
            kind,
            states,
            suffix: 0,
            now,
            epoch: Epoch::FIRST,
            had: None,
            replicas: 0,
        }
    }

    /// Sends an acquire; the reply is yet to come.
    fn ask(&mut self, task: usize, mode: AcquireMode) -> HoldRequest {
        let (caller, state) = &mut self.states[task];
        let siblings = SiblingState {
            caller,
            sibling: None,
            lost_sibling: None,
            suffix: self.suffix,
            value_in_doubt: false,
        };
        let Ok(AcquirePlan::Send(request)) =
            state.plan(mode, siblings, self.now, &mut Effects::default())
        else {
            panic!("nothing is unsettled")
        };
        state.send(&request, self.epoch, self.now);
        request
    }

    fn granted(&mut self, task: usize, request: &HoldRequest) -> Ticket {
        let copied = Copied {
            wanted: self.had.map_or(0, u32::from),
            had: self.had,
        };
        let grant = Grant {
            copied,
            ..Grant::of(self.now, HandOff::lease(TTL))
        };
        let (_, state) = &mut self.states[task];
        let granted = state.granted(
            request,
            &grant,
            self.epoch,
            self.now,
            &mut Effects::default(),
        );
        granted.unwrap().expect("its lease is not over")
    }

    fn hand_on(&mut self, task: usize, ticket: &Ticket) -> Option<HandOff> {
        let (_, state) = &mut self.states[task];
        let held = state.wanted();
        let hand_off = state.hand_on(
            &self.kind,
            ticket,
            self.epoch,
            TTL,
            self.now,
            &mut Effects::default(),
        );
        assert_eq!(
            state.wanted(),
            if hand_off.is_some() { 0 } else { held },
            "who keeps it holds it as before"
        );
        self.suffix += u64::from(hand_off.is_some());
        hand_off
    }

    fn take(&mut self, task: usize, hand_off: &HandOff) -> Option<Ticket> {
        let request = self.ask(task, MODE);
        let taker = TakerTerms {
            lease: HandOff::lease(TTL),
            replicas: self.replicas,
            epoch: self.epoch,
        };
        let (_, state) = &mut self.states[task];
        let ticket = state.take(&request, hand_off, taker, self.now);
        if ticket.is_none() {
            state.not_executed(&request);
        }
        ticket
    }

    /// Acquires the lock from the server.
    fn acquire(&mut self, task: usize) -> Ticket {
        let request = self.ask(task, MODE);
        self.granted(task, &request)
    }
}

/// Other clients must get their turn, however fast these tasks are.
#[test]
fn a_round_is_over_when_the_hold_has_changed_hands_64_times() {
    let mut tasks = Tasks::new(3);
    for round in 0..2 {
        let mut ticket = tasks.acquire(0);
        for hop in 0..64 {
            let hand_off = tasks
                .hand_on(hop % 2, &ticket)
                .unwrap_or_else(|| panic!("round {round}, hop {hop}"));
            ticket = tasks
                .take((hop + 1) % 2, &hand_off)
                .expect("who takes it has nothing else");
        }
        assert!(tasks.hand_on(0, &ticket).is_none(), "a round has no end");
        // the release goes to the server, which picks the next holder
        let (_, state) = &mut tasks.states[0];
        state
            .leave(&ticket, tasks.now, &mut Effects::default())
            .unwrap();
        let release = state.plan_release().expect("it is recorded");
        state.send(&release, tasks.epoch, tasks.now);
        state.released(
            &release,
            crate::store::Released::Free,
            tasks.epoch,
            &mut Effects::default(),
        );
        state.forget_ended();
    }
}

#[test]
fn a_round_is_over_2_ms_after_the_servers_word() {
    let mut tasks = Tasks::new(2);
    let ticket = tasks.acquire(0);
    tasks.now = tasks.now + HAND_OFF_WINDOW / 2;
    let hand_off = tasks.hand_on(0, &ticket).expect("the first");
    // taking the hold does not renew the server's reply
    let ticket = tasks
        .take(1, &hand_off)
        .expect("who takes it has nothing else");
    tasks.now = tasks.now + HAND_OFF_WINDOW / 2;
    assert!(tasks.hand_on(1, &ticket).is_none(), "a round has no end");
}

/// If the reply to an adopt request is lost, the request is sent again under the same name. The
/// first one may still arrive, and would set the lease of any later hold with that name.
#[test]
fn what_a_late_request_may_still_touch_is_not_handed_on() {
    for is_late in [false, true] {
        let mut tasks = Tasks::new(2);
        let mode = |adopts| AcquireMode {
            adopts: Some(adopts),
            ..MODE
        };
        let mut request = tasks.ask(0, mode(Adopts::First));
        if is_late {
            tasks.epoch = tasks.epoch.next();
            let again = tasks.ask(0, mode(Adopts::Again));
            assert_eq!(
                again.owner, request.owner,
                "it is asked for by the same name"
            );
            request = again;
        }
        let ticket = tasks.granted(0, &request);
        assert_eq!(tasks.hand_on(0, &ticket).is_none(), is_late);
    }
}

/// The server may have restarted, and lost the record.
#[test]
fn an_earlier_connections_hold_is_neither_handed_on_nor_taken() {
    let mut tasks = Tasks::new(2);
    let ticket = tasks.acquire(0);
    let hand_off = tasks.hand_on(0, &ticket).expect("the first");
    tasks.epoch = tasks.epoch.next();
    assert!(tasks.take(1, &hand_off).is_none());
    let mut tasks = Tasks::new(2);
    let ticket = tasks.acquire(0);
    tasks.epoch = tasks.epoch.next();
    assert!(tasks.hand_on(0, &ticket).is_none());
}

#[test]
fn what_fewer_replicas_have_is_not_taken() {
    for (had, replicas, is_taken) in [
        (None, 0, true),
        (None, 1, false),
        (Some(1), 1, true),
        (Some(1), 2, false),
    ] {
        let mut tasks = Tasks::new(2);
        (tasks.had, tasks.replicas) = (had, replicas);
        let ticket = tasks.acquire(0);
        let hand_off = tasks.hand_on(0, &ticket).expect("the first");
        let taken = tasks.take(1, &hand_off);
        assert_eq!(taken.is_some(), is_taken, "{had:?} {replicas}");
        assert!(taken.is_none_or(|ticket| ticket.replicas == had));
    }
}
