//! How long a hold may change hands, and which may not.

use super::*;
use crate::{
    engine::{
        kind::{About, Adopts},
        state::{Around, Door, Planned},
    },
    keys::LockName,
    lock::Reentrant,
    owner::ClientId,
};

const TTL: Duration = Duration::from_secs(30);
const DOOR: Door =
    Door { about: About::plain("reentrant"), waits: true, adopts: None, max_holds: u32::MAX, after_loss: false };

/// What tasks of one client have of one lock, each under a name of its own.
struct Tasks {
    kind: Arc<dyn Kind>,
    states: Vec<(OwnerId, State)>,
    /// Names that were retired.
    suffix: u64,
    now: Instant,
    epoch: Epoch,
    /// How many replicas had what is granted.
    had: Option<u8>,
    /// How many whoever takes it asks for.
    replicas: u32,
}

impl Tasks {
    fn new(tasks: usize) -> Self {
        let (client, now) = (ClientId::random(), Instant::from_millis(1_000));
        let state = |task| {
            let owner = OwnerId::named(&client, &format!("task-{task}")).unwrap();
            (owner.clone(), State::new(owner, now))
        };
        let states = (0..tasks).map(state).collect();
        let kind = Arc::new(Reentrant::new(&LockName::new("", "l", 1024).unwrap()));
        Self { kind, states, suffix: 0, now, epoch: Epoch::FIRST, had: None, replicas: 0 }
    }

    /// Asks for the lock; the answer is yet to come.
    fn ask(&mut self, task: usize, door: Door) -> Request {
        let (caller, state) = &mut self.states[task];
        let around = Around { caller, sibling: None, lost_sibling: None, suffix: self.suffix, value_in_doubt: false };
        let Planned::Send(request) = state.plan(door, around, self.now, &mut Effects::default()) else {
            panic!("nothing is unsettled")
        };
        state.send(&request, self.epoch, self.now);
        request
    }

    fn granted(&mut self, task: usize, request: &Request) -> Ticket {
        let copied = Copied { wanted: self.had.map_or(0, u32::from), had: self.had };
        let grant = Grant { copied, ..Grant::of(self.now, Baton::lease(TTL)) };
        let (_, state) = &mut self.states[task];
        let granted = state.granted(request, &grant, self.epoch, self.now, &mut Effects::default());
        granted.unwrap().expect("its lease is not over")
    }

    fn hand_on(&mut self, task: usize, ticket: &Ticket) -> Option<Baton> {
        let (_, state) = &mut self.states[task];
        let held = state.wanted();
        let baton = state.hand_on(&self.kind, ticket, self.epoch, TTL, self.now, &mut Effects::default());
        assert_eq!(state.wanted(), if baton.is_some() { 0 } else { held }, "who keeps it holds it as before");
        self.suffix += u64::from(baton.is_some());
        baton
    }

    fn take(&mut self, task: usize, baton: &Baton) -> Option<Ticket> {
        let request = self.ask(task, DOOR);
        let (_, state) = &mut self.states[task];
        let taken = state.take(&request, baton, (Baton::lease(TTL), self.replicas), self.epoch, self.now);
        if taken.is_none() {
            state.not_executed(&request);
        }
        taken
    }

    /// Acquires it by the server's word.
    fn acquire(&mut self, task: usize) -> Ticket {
        let request = self.ask(task, DOOR);
        self.granted(task, &request)
    }
}

/// So that other clients have their turn, however fast these are.
#[test]
fn a_round_is_over_when_the_hold_has_changed_hands_64_times() {
    let mut tasks = Tasks::new(3);
    for round in 0..2 {
        let mut ticket = tasks.acquire(0);
        for leg in 0..64 {
            let baton = tasks.hand_on(leg % 2, &ticket).unwrap_or_else(|| panic!("round {round}, leg {leg}"));
            ticket = tasks.take((leg + 1) % 2, &baton).expect("who takes it has nothing else");
        }
        assert!(tasks.hand_on(0, &ticket).is_none(), "a round has no end");
        // the server is told, and is the one who says who is next
        let (_, state) = &mut tasks.states[0];
        state.leave(&ticket, tasks.now, &mut Effects::default()).unwrap();
        let release = state.plan_release().expect("it is recorded");
        state.send(&release, tasks.epoch, tasks.now);
        state.released(&release, crate::store::Released::Free, tasks.epoch, &mut Effects::default());
        state.forget_ended();
    }
}

#[test]
fn a_round_is_over_2_ms_after_the_servers_word() {
    let mut tasks = Tasks::new(2);
    let ticket = tasks.acquire(0);
    tasks.now = tasks.now + ROUND / 2;
    let baton = tasks.hand_on(0, &ticket).expect("the first");
    // that it was taken since does not make the word any newer
    let ticket = tasks.take(1, &baton).expect("who takes it has nothing else");
    tasks.now = tasks.now + ROUND / 2;
    assert!(tasks.hand_on(1, &ticket).is_none(), "a round has no end");
}

/// Whoever was adopted by a request whose answer was lost was asked for again, under the same name: the first one may still
/// come, and would set the lease of whoever goes by that name then.
#[test]
fn what_a_late_request_may_still_touch_is_not_handed_on() {
    for is_late in [false, true] {
        let mut tasks = Tasks::new(2);
        let door = |adopts| Door { adopts: Some(adopts), ..DOOR };
        let mut request = tasks.ask(0, door(Adopts::First));
        if is_late {
            tasks.epoch = tasks.epoch.next();
            let again = tasks.ask(0, door(Adopts::Again));
            assert_eq!(again.owner, request.owner, "it is asked for by the same name");
            request = again;
        }
        let ticket = tasks.granted(0, &request);
        assert_eq!(tasks.hand_on(0, &ticket).is_none(), is_late);
    }
}

/// The server was restarted meanwhile, perhaps, and has forgotten it.
#[test]
fn what_an_earlier_connection_has_confirmed_is_neither_handed_on_nor_taken() {
    let mut tasks = Tasks::new(2);
    let ticket = tasks.acquire(0);
    let baton = tasks.hand_on(0, &ticket).expect("the first");
    tasks.epoch = tasks.epoch.next();
    assert!(tasks.take(1, &baton).is_none());
    let mut tasks = Tasks::new(2);
    let ticket = tasks.acquire(0);
    tasks.epoch = tasks.epoch.next();
    assert!(tasks.hand_on(0, &ticket).is_none());
}

#[test]
fn what_fewer_replicas_have_is_not_taken() {
    for (had, replicas, is_taken) in [(None, 0, true), (None, 1, false), (Some(1), 1, true), (Some(1), 2, false)] {
        let mut tasks = Tasks::new(2);
        (tasks.had, tasks.replicas) = (had, replicas);
        let ticket = tasks.acquire(0);
        let baton = tasks.hand_on(0, &ticket).expect("the first");
        let taken = tasks.take(1, &baton);
        assert_eq!(taken.is_some(), is_taken, "{had:?} {replicas}");
        assert!(taken.is_none_or(|ticket| ticket.replicas == had));
    }
}
