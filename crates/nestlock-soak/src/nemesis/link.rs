//! Faults between a client and a server: what TCP can do to both.

use std::{io, thread, time::Duration};

use super::fault::{Effect, Fault};
use crate::support::proxy::{Action, Proxy, Request, Way};

pub(super) const SORTS: [(&str, u64, u64); 18] = [
    // requests delivered after the cut. Handshakes pass: otherwise no request of an older
    // connection could meet a newer one
    ("ghost", 50, 400),
    ("ghosts", 50, 400),
    ("reply-loss", 50, 400),
    ("cut-before", 50, 400),
    ("cut", 5, 20),
    ("cuts", 100, 500),
    ("truncate", 50, 300),
    ("delay-requests", 100, 900),
    ("delay-replies", 100, 900),
    ("drip", 100, 600),
    ("one-way-out", 50, 1200),
    ("one-way-in", 50, 1200),
    ("mute", 50, 600),
    // faults of a middlebox
    ("swallow", 50, 400),
    ("double", 50, 400),
    ("swap", 50, 400),
    ("refuse", 50, 1200),
    ("no-messages", 200, 2000),
];

pub(super) fn strike(proxy: &Proxy, fault: &Fault) -> io::Result<Effect> {
    proxy.forget_requests();
    let some = |most: u32, action: Action| {
        let mut left = most;
        proxy.rule(move |request: &Request| {
            if left == 0 || !request.is_script() {
                return Action::Pass;
            }
            left -= 1;
            action
        });
    };
    // mostly within the command timeout, sometimes long after it
    let late = if fault.arg.is_multiple_of(4) {
        fault.arg + 300
    } else {
        fault.arg / 5
    };
    let mut after = 0;
    match &*fault.sort {
        "ghost" | "ghosts" => {
            some(
                if fault.sort == "ghost" { 1 } else { 4 },
                Action::Ghost(Duration::from_millis(late)),
            );
            after = late;
        }
        "reply-loss" => some(1 + fault.arg as u32 % 3, Action::Lose),
        "cut-before" => some(1 + fault.arg as u32 % 3, Action::CutBefore),
        "cut" => proxy.cut(),
        "cuts" => {
            for _ in 0..5 {
                proxy.cut();
                thread::sleep(Duration::from_millis(fault.ms / 5));
            }
        }
        "truncate" => some(1 + fault.arg as u32 % 3, Action::Truncate),
        "delay-requests" => each(
            proxy,
            Action::Slow(Duration::from_millis(5 + fault.arg / 8)),
        ),
        "delay-replies" => each(
            proxy,
            Action::Late(Duration::from_millis(5 + fault.arg / 8)),
        ),
        "drip" => each(
            proxy,
            Action::Drip(Duration::from_micros(500 + fault.arg * 4)),
        ),
        "one-way-out" => proxy.black_hole(Way::ToClient),
        "one-way-in" => proxy.black_hole(Way::ToServer),
        "mute" => some(1, Action::Mute),
        "swallow" => some(1 + fault.arg as u32 % 3, Action::Swallow),
        "double" => some(1 + fault.arg as u32 % 3, Action::Double),
        "swap" => some(1 + fault.arg as u32 % 3, Action::Swap),
        "refuse" => {
            proxy.refuse();
            proxy.cut();
        }
        "no-messages" => proxy.drop_messages(true),
        other => return Err(io::Error::other(format!("unknown fault: {other}"))),
    }
    fault.sleep();
    if fault.sort.starts_with("one-way") && fault.arg.is_multiple_of(2) {
        // what was sent into the black hole is lost with the connection
        proxy.cut();
    }
    proxy.heal();
    thread::sleep(Duration::from_millis(after));
    Ok(Effect::Kept)
}

fn each(proxy: &Proxy, action: Action) {
    proxy.rule(move |_| action);
}
