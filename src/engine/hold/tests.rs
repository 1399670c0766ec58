//! What guards, late answers and hand-overs may do to a hold.

use super::*;
use crate::{
    engine::{
        holds::Holds,
        kind::About,
        lease::{Lease, Millis},
    },
    keys::LockName,
    lock::Reentrant,
    owner::ClientId,
};

const DOOR: Door = Door { about: About::plain("reentrant"), waits: false, max_holds: u32::MAX, after_loss: false };

fn kind() -> Arc<dyn Kind> {
    Arc::new(Reentrant::new(&LockName::new("", "l", 1024).unwrap()))
}

fn entered(holds: &Holds, hold: &Arc<Hold>, sent: Instant, lease: Duration) -> Option<Ticket> {
    let door = Door { after_loss: true, ..DOOR };
    let Ok(Next::Send(request)) = hold.plan(door, holds.around(hold)) else { panic!("nothing is in doubt") };
    let grant = Grant { sent, lease: Lease::Fixed(Millis::of(lease)), kept_every: None, token: None };
    hold.granted(&request, &grant, Epoch::FIRST).unwrap()
}

fn new(holds: &Holds) -> Arc<Hold> {
    holds.get_or_insert(&kind(), &OwnerId::named(&ClientId::random(), "me").unwrap())
}

/// A guard that is given up while its hold is lost and taken anew must not take the new hold along.
#[test]
fn a_stale_ticket_never_gives_back_a_later_hold() {
    let holds = Holds::new(Duration::from_secs(3));
    let hold = new(&holds);
    let lease = Duration::from_secs(30);
    let stale = entered(&holds, &hold, Instant::now(), lease).unwrap();
    hold.lose_generation(&stale.generation, LossReason::RecordMissing);
    let inside = hold.plan(DOOR, holds.around(&hold));
    assert!(matches!(inside, Err(Error::Lost { .. })), "a guard of what was lost lives");
    let fresh = entered(&holds, &hold, Instant::now(), lease).unwrap();
    for _ in 0..2 {
        assert!(matches!(hold.leave(&stale), Err(Error::Lost { .. })));
        assert_eq!(hold.count(), 1);
    }
    assert!(fresh.generation.remaining().is_ok());
    assert!(matches!(hold.leave(&fresh), Ok(Left::Here(_))));
    assert_eq!(hold.count(), 0);
}

/// The watchdog takes a hold out of its queue, and looks a moment later.
#[test]
fn a_hold_that_was_taken_anew_does_not_expire() {
    let holds = Holds::new(Duration::from_secs(3));
    let hold = new(&holds);
    let stale = entered(&holds, &hold, Instant::now() - Duration::from_millis(50), Duration::from_millis(60));
    std::thread::sleep(Duration::from_millis(20));
    let due = holds.due.take(Instant::now());
    assert_eq!(due.len(), usize::from(stale.is_some()));
    if let Some(stale) = stale {
        assert!(hold.leave(&stale).is_err());
    }
    // the record is gone, too
    if let Some(request) = hold.send_release(Epoch::FIRST) {
        hold.released(&request, Released::NotHeld, Epoch::FIRST);
    }
    let fresh = entered(&holds, &hold, Instant::now(), Duration::from_secs(30)).unwrap();
    assert!(matches!(hold.look(Instant::now()), Look::Nothing));
    assert!(fresh.generation.remaining().is_ok());
}

/// A renewal that was sent before the lease ended, and answered after, brings nothing back.
#[test]
fn a_loss_is_final() {
    let holds = Holds::new(Duration::from_secs(3));
    let hold = new(&holds);
    let sent = Instant::now();
    let ticket = entered(&holds, &hold, sent, Duration::from_millis(30)).unwrap();
    std::thread::sleep(Duration::from_millis(40));
    hold.renewed(&ticket.generation, Renewed::Yes, sent, Duration::from_secs(30), Some(sent));
    assert!(ticket.generation.remaining().is_err());
    assert!(matches!(hold.leave(&ticket), Err(Error::Lost { reason: LossReason::LeaseExpired, .. })));
}

/// What was handed over is nothing of its owner's.
#[test]
fn a_hold_that_was_handed_over_is_neither_planned_nor_settled() {
    let holds = Holds::new(Duration::from_secs(3));
    let hold = new(&holds);
    let ticket = entered(&holds, &hold, Instant::now(), Duration::from_secs(30)).unwrap();
    assert!(matches!(hold.hand_over(&ticket), Some(Unsettled::Nothing)));
    assert!(matches!(hold.plan(DOOR, holds.around(&hold)), Ok(Next::Forget)));
    assert!(hold.send_release(Epoch::FIRST).is_none());
    assert_eq!(hold.leftover(), Leftover::Held);
    hold.lose(LossReason::RecordMissing);
    assert_eq!(hold.leftover(), Leftover::Nothing);
}
