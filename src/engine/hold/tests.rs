//! Tests of what guards and late replies may do to a hold.

use std::time::Duration;

use super::*;
use crate::{
    engine::{
        hold::registry::Holds,
        kind::KindInfo,
        lease::{Lease, Millis},
    },
    keys::LockName,
    lock::Reentrant,
    owner::ClientId,
    store::{Released, Renewed},
    sync::{
        spawn,
        tests::{explore, moments},
    },
};

const MODE: AcquireMode<'_> = AcquireMode {
    about: KindInfo::plain("reentrant"),
    waits: false,
    adopts: None,
    max_holds: u32::MAX,
    after_loss: false,
    named: None,
    turn: None,
};

fn kind() -> Arc<dyn Kind> {
    Arc::new(Reentrant::new(&LockName::new("", "l", 1024).unwrap()))
}

fn entered(holds: &Holds, hold: &Arc<Hold>, sent: Instant, lease: Duration) -> Option<Ticket> {
    let mode = AcquireMode {
        after_loss: true,
        ..MODE
    };
    let Ok(AcquirePlan::Send(request)) = hold.plan(mode, holds.sibling_state(hold), Instant::now())
    else {
        panic!("nothing is in doubt")
    };
    let grant = Grant::of(sent, Lease::Fixed(Millis::of(lease)));
    hold.granted(&request, &grant, Epoch::FIRST).unwrap()
}

fn new(holds: &Holds) -> Arc<Hold> {
    holds.get_or_insert(&kind(), &OwnerId::named(&ClientId::random(), "me").unwrap())
}

/// Giving up the guard of a lost hold must not give up a hold that was acquired later.
#[test]
fn a_stale_ticket_never_gives_back_a_later_hold() {
    shuttle::check_random(
        || {
            let holds = Holds::new(Duration::from_secs(3), Meter::default());
            let hold = new(&holds);
            let lease = Duration::from_secs(30);
            let stale = entered(&holds, &hold, Instant::now(), lease).unwrap();
            hold.change(|state, effects| state.lose(LossReason::RecordMissing, effects));
            let inside = hold.plan(MODE, holds.sibling_state(&hold), Instant::now());
            assert!(
                matches!(inside, Err(Error::Lost { .. })),
                "a guard of the lost hold lives"
            );
            let fresh = entered(&holds, &hold, Instant::now(), lease).unwrap();
            for _ in 0..2 {
                assert!(matches!(
                    hold.leave(&stale, Instant::now()),
                    Err(Error::Lost { .. })
                ));
                assert_eq!(hold.count(), 1);
            }
            assert!(fresh.generation.remaining().is_ok());
            hold.leave(&fresh, Instant::now()).unwrap();
            assert_eq!(hold.count(), 0);
        },
        1,
    );
}

/// The watchdog takes a hold out of its queue and polls it a moment later. A hold acquired in
/// between must not expire.
#[test]
fn a_hold_that_was_acquired_again_does_not_expire() {
    shuttle::check_random(
        || {
            let holds = Holds::new(Duration::from_secs(3), Meter::default());
            let hold = new(&holds);
            let stale = entered(
                &holds,
                &hold,
                Instant::now() - Duration::from_millis(50),
                Duration::from_millis(60),
            );
            std::thread::sleep(Duration::from_millis(20));
            let due = holds.due.take(Instant::now());
            assert_eq!(due.len(), usize::from(stale.is_some()));
            if let Some(stale) = stale {
                assert!(hold.leave(&stale, Instant::now()).is_err());
            }
            // The record is gone, too.
            if let Some(request) = hold.send_release(Epoch::FIRST, Instant::now()) {
                hold.change(|state, effects| {
                    state.released(&request, Released::NotHeld, Epoch::FIRST, effects)
                });
            }
            let fresh = entered(&holds, &hold, Instant::now(), Duration::from_secs(30)).unwrap();
            assert!(matches!(hold.poll(Instant::now()), Due::Nothing));
            assert!(fresh.generation.remaining().is_ok());
        },
        1,
    );
}

/// A renewal that was sent before the lease ended revives nothing if its reply comes later.
#[test]
fn a_loss_is_final() {
    shuttle::check_random(
        || {
            let holds = Holds::new(Duration::from_secs(3), Meter::default());
            let hold = new(&holds);
            let sent = Instant::now();
            let ticket = entered(&holds, &hold, sent, Duration::from_millis(30)).unwrap();
            std::thread::sleep(Duration::from_millis(40));
            let reply = RenewalReply {
                renewed: Renewed::Yes,
                sent,
                ttl: Duration::from_secs(30),
                next: Some(sent),
            };
            hold.renewed(&ticket.generation, reply);
            assert!(ticket.generation.remaining().is_err());
            assert!(matches!(
                hold.leave(&ticket, Instant::now()),
                Err(Error::Lost {
                    reason: LossReason::LeaseExpired,
                    ..
                })
            ));
        },
        1,
    );
}

/// After an owner has left its hold to the lease, it cannot acquire under it, and nothing ends it
/// but its lease.
#[test]
fn a_hold_that_is_left_is_neither_planned_nor_released() {
    shuttle::check_random(
        || {
            let holds = Holds::new(Duration::from_secs(3), Meter::default());
            let hold = new(&holds);
            let ticket = entered(&holds, &hold, Instant::now(), Duration::from_secs(30)).unwrap();
            hold.change(|state, effects| state.leave_to_lease(&ticket, Instant::now(), effects));
            assert!(matches!(
                hold.plan(MODE, holds.sibling_state(&hold), Instant::now()),
                Ok(AcquirePlan::Forget)
            ));
            assert!(hold.send_release(Epoch::FIRST, Instant::now()).is_none());
            hold.change(HoldState::shut_down);
            assert_eq!(hold.residue(), Residue::Left);
            // no list keeps it: there may be many, with long leases
            assert_eq!(hold.state().next_poll(Duration::from_secs(3)), None);
            hold.change(|state, effects| state.lose(LossReason::LeaseExpired, effects));
            assert_eq!(hold.residue(), Residue::Nothing);
        },
        1,
    );
}

/// Acquires an owner's hold under the owner lock, gives it up, and forgets it if there is no other
/// user. Returns whether a hold of the owner is known afterwards.
///
/// `leaves`: leaves the hold to its lease instead; then the record ends.
async fn comes_and_goes(
    holds: &Holds,
    kind: &Arc<dyn Kind>,
    owner: &OwnerId,
    leaves: bool,
) -> bool {
    loop {
        let hold = holds.get_or_insert(kind, owner);
        let permit = hold.owner_lock.acquire().await.unwrap();
        if hold.is_left() {
            holds.forget(&hold);
            continue;
        }
        let ticket = entered(holds, &hold, Instant::now(), Duration::from_secs(30)).unwrap();
        moments(3).await;
        let known = holds.get(kind, owner).expect("it is held");
        assert!(Arc::ptr_eq(&known, &hold), "an owner has two holds");
        drop(known);
        if leaves {
            holds.retire_names();
            hold.change(|state, effects| state.leave_to_lease(&ticket, Instant::now(), effects));
            drop(permit);
            moments(3).await;
            holds.forget(&hold);
            moments(3).await;
            hold.change(|state, effects| state.lose(LossReason::RecordMissing, effects));
        } else {
            hold.leave(&ticket, Instant::now()).unwrap();
            let request = hold
                .send_release(Epoch::FIRST, Instant::now())
                .expect("it was held");
            hold.change(|state, effects| {
                state.released(&request, Released::Free, Epoch::FIRST, effects)
            });
            drop(permit);
        }
        drop(ticket);
        holds.reap(&hold);
        return holds.get(kind, owner).is_some();
    }
}

#[test]
fn a_hold_is_forgotten_with_its_last_user_and_never_before() {
    explore(2_000, &["another task has the hold"], |seen| {
        let holds = Arc::new(Holds::new(Duration::from_secs(3), Meter::default()));
        let (kind, owner) = (kind(), OwnerId::named(&ClientId::random(), "me").unwrap());
        let user = |leaves| {
            let (holds, kind, owner) = (Arc::clone(&holds), Arc::clone(&kind), owner.clone());
            let seen = seen.clone();
            spawn(async move {
                if comes_and_goes(&holds, &kind, &owner, leaves).await {
                    seen.note("another task has the hold");
                }
            })
        };
        let users = [user(false), user(true), user(false)];
        let watchdog = Arc::clone(&holds);
        let reaper = spawn(async move {
            for _ in 0..8 {
                moments(4).await;
                watchdog.reap_again();
            }
        });
        shuttle::future::block_on(async {
            for task in users.into_iter().chain([reaper]) {
                task.await.unwrap();
            }
            while holds.reap_again() {
                shuttle::future::yield_now().await;
            }
        });
        assert_eq!(holds.len(), 0, "{holds:?}");
    });
}

/// The watchdog has a handle of a hold in use at the moment when its last user gives it up.
#[test]
fn a_hold_is_forgotten_even_if_it_is_polled_when_it_ends() {
    explore(2_000, &["another task has the hold"], |seen| {
        let holds = Arc::new(Holds::new(Duration::from_secs(3), Meter::default()));
        let (kind, owner) = (kind(), OwnerId::named(&ClientId::random(), "me").unwrap());
        let (first, last) = (
            holds.get_or_insert(&kind, &owner),
            holds.get_or_insert(&kind, &owner),
        );
        holds.reap(&first);
        drop(first);
        let ticket = entered(&holds, &last, Instant::now(), Duration::from_secs(30)).unwrap();
        let of_user = Arc::clone(&holds);
        let user = spawn(async move {
            last.leave(&ticket, Instant::now()).unwrap();
            let request = last
                .send_release(Epoch::FIRST, Instant::now())
                .expect("it was held");
            last.change(|state, effects| {
                state.released(&request, Released::Free, Epoch::FIRST, effects)
            });
            of_user.reap(&last);
        });
        holds.reap_again();
        if holds.len() > 0 {
            seen.note("another task has the hold");
        }
        shuttle::future::block_on(user).unwrap();
        while holds.reap_again() {}
        assert_eq!(holds.len(), 0, "{holds:?}");
    });
}
