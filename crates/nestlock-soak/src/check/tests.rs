//! Tests that the checker can fail: handmade histories, each with one thing wrong. Times are in
//! milliseconds here.

use super::{records::Records, verdict};

const JOURNAL: &str = "# mode=aof seed=1 seconds=1";

/// Checks histories, given as names and lines. It converts their times to nanoseconds, and returns
/// the sorts of the violations.
fn check_with(journal: &str, histories: &[(&str, &str)]) -> Vec<&'static str> {
    let scale = |line: &str| {
        let words: Vec<&str> = line.trim().split(' ').collect();
        let times = if words
            .get(1)
            .is_some_and(|what| what.ends_with("gap") || what.starts_with("sgap"))
        {
            [0, 2]
        } else {
            [0, 0]
        };
        let times = if words.get(1) == Some(&"fault") {
            [0, 2]
        } else {
            times
        };
        let word = |(at, word): (usize, &&str)| {
            if times.contains(&at) {
                format!("{word}000000")
            } else {
                (*word).to_owned()
            }
        };
        words
            .iter()
            .enumerate()
            .map(word)
            .collect::<Vec<_>>()
            .join(" ")
    };
    let text = |text: &str| {
        text.lines()
            .filter(|line| !line.trim().is_empty())
            .map(scale)
            .collect::<Vec<_>>()
            .join("\n")
    };
    let (first, rest) = journal.split_once('\n').unwrap_or((journal, ""));
    let journal = format!("{first}\n{}", text(rest));
    let files = histories.iter().map(|(name, lines)| {
        let conf = format!("0 conf {name}c0 1200 0\n0 conf {name}c1 1200 -\n");
        (
            (*name).to_owned(),
            std::io::Cursor::new(conf + &text(lines)),
        )
    });
    let records = Records::parse(&journal, files).unwrap();
    verdict(&records)
        .into_iter()
        .map(|violation| violation.sort)
        .collect()
}

fn check(histories: &[(&str, &str)]) -> Vec<&'static str> {
    check_with(JOURNAL, histories)
}

/// One hold of a mutex, without its release.
const A: &str = "100 call 1 s0g0c0t0 a mutex m alone bounded 50 - -\n110 got 1 o -\n120 ok 1 1000000\n200 ok 1 1000000\n";

#[test]
fn what_is_right_is_right() {
    let b = "100 call 1 s1g0c0t0 b mutex m alone unbounded - - -\n211 got 1 o -\n220 ok 1 1000000\n230 rel 1 unlock\n231 end 1 Ok";
    assert_eq!(
        check(&[
            ("s0g0", &format!("{A}210 rel 1 unlock\n212 end 1 Ok")),
            ("s1g0", b)
        ]),
        [""; 0]
    );
}

#[test]
fn two_holders_are_found() {
    let b = |got: u64| {
        format!(
            "100 call 1 s1g0c0t0 b mutex m alone unbounded - - -\n{got} got 1 o -\n{} ok 1 1000000\n250 rel 1 drop",
            got + 5
        )
    };
    let end = |result: &str| format!("{A}210 rel 1 unlock\n212 end 1 {result}");
    let sorts = |got, result| check(&[("s0g0", &end(result)), ("s1g0", &b(got))]);
    assert_eq!(sorts(190, "Ok"), ["two holders"]);
    // an unlock that returned Ok proves the hold until it began; any other proves nothing
    assert_eq!(sorts(205, "Ok"), ["two holders"]);
    assert_eq!(sorts(205, "Unconfirmed/Timeout"), ["error"]);
    assert_eq!(sorts(211, "Ok"), [""; 0]);
    // neither starvation nor a fault without loss of data excuses it
    let starved = format!("{}\n300 gap 100", end("Ok"));
    let journal = format!("{JOURNAL}\n90 fault 300 server kill 0 0 5 5 kept");
    assert_eq!(
        check_with(&journal, &[("s0g0", &starved), ("s1g0", &b(190))]),
        ["two holders"]
    );
    // a server that lost its data does
    let journal = "# mode=plain seed=1\n150 fault 155 server flushall 0 0 5 5 forgot";
    assert_eq!(
        check_with(
            journal,
            &[("s0g0", &end("Lost/RecordMissing")), ("s1g0", &b(190))]
        ),
        [""; 0]
    );
    // but not before the loss
    assert_eq!(
        check_with(
            journal,
            &[("s0g0", &end("Lost/RecordMissing")), ("s1g0", &b(130))]
        ),
        ["two holders"]
    );
    // and not if it was another server
    let other = journal.replace("flushall 0 0", "flushall 0 1");
    assert_eq!(
        check_with(&other, &[("s0g0", &end("Ok")), ("s1g0", &b(190))]),
        ["two holders"]
    );
}

#[test]
fn readers_are_together_and_writers_alone() {
    let hold = |who: &str, class: &str, got: u64, end: u64| {
        format!(
            "100 call 1 {who} {who} read-write rw {class} unbounded - - -\n{got} got 1 o -\n{end} ok 1 1000000\n{end} rel 1 drop"
        )
    };
    let sorts = |a: (&str, u64, u64), b: (&str, u64, u64)| {
        check(&[
            ("s0g0", &hold("s0g0c0t0", a.0, a.1, a.2)),
            ("s1g0", &hold("s1g0c0t0", b.0, b.1, b.2)),
        ])
    };
    assert_eq!(sorts(("shared", 110, 200), ("shared", 120, 300)), [""; 0]);
    assert_eq!(
        sorts(("alone", 110, 200), ("shared", 120, 300)),
        ["two holders"]
    );
    assert_eq!(
        sorts(("shared", 110, 200), ("alone", 199, 300)),
        ["two holders"]
    );
    assert_eq!(sorts(("shared", 110, 200), ("alone", 200, 300)), [""; 0]);
}

#[test]
fn permits_have_as_many_holders_as_there_are() {
    let hold = |who: &str, got: u64| {
        format!(
            "100 call 1 {who} {who} permits p alone unbounded - - -\n{got} got 1 o -\n200 ok 1 1000000\n200 rel 1 drop"
        )
    };
    let sorts = |third: u64| {
        check(&[
            ("s0g0", &hold("s0g0c0t0", 110)),
            ("s1g0", &hold("s1g0c0t0", 120)),
            ("s2g0", &hold("s2g0c0t0", third)),
        ])
    };
    assert_eq!(sorts(199), ["two holders"]);
    assert_eq!(sorts(200), [""; 0]);
}

#[test]
fn a_token_that_does_not_rise_is_found() {
    let hold = |who: &str, call: u64, token: &str| {
        format!(
            "{call} call 1 {who} {who} fenced f alone unbounded - - -\n{} got 1 o {token}\n{} rel 1 drop",
            call + 5,
            call + 6
        )
    };
    let sorts = |first, second, later| {
        check(&[
            ("s0g0", &hold("s0g0c0t0", 100, first)),
            ("s1g0", &hold("s1g0c0t0", later, second)),
        ])
    };
    assert_eq!(sorts("5", "6", 200), [""; 0]);
    assert_eq!(sorts("5", "5", 200), ["token"]);
    assert_eq!(sorts("5", "4", 200), ["token"]);
    assert_eq!(sorts("5", "-", 200), ["token"]);
    // a holder that called before the other had its token may have come first
    assert_eq!(sorts("5", "4", 103), [""; 0]);
}

#[test]
fn a_guarded_write_that_goes_back_is_found() {
    let put = |token: u64, begin: u64, result: &str| {
        format!("{begin} put 1 k {token}\n{} done 1 {result}", begin + 5)
    };
    let sorts = |first, later, result| {
        check(&[
            ("s0g0", &put(first, 100, "Ok")),
            ("s1g0", &put(later, 200, result)),
        ])
    };
    assert_eq!(sorts(5, 6, "Ok"), [""; 0]);
    assert_eq!(sorts(5, 4, "Ok"), ["guarded write"]);
    assert_eq!(sorts(5, 4, "StaleToken"), [""; 0]);
    let held = "100 call 1 s0g0c0t0 a fenced f alone unbounded - - -\n101 got 1 o 7\n102 put 1 k 7\n105 done 1 StaleToken\n110 ok 1 1000000\n111 rel 1 drop";
    assert_eq!(check(&[("s0g0", held)]), ["guarded write"]);
}

#[test]
fn what_the_server_says_of_a_hold_is_compared() {
    let a = |line: &str| {
        check(&[(
            "s0g0",
            &format!("{A}{line}\n220 ok 1 1000000\n221 rel 1 drop"),
        )])
    };
    assert_eq!(a("210 count 1 1 1\n210 holder 1 o o"), [""; 0]);
    assert_eq!(a("210 count 1 2 1"), ["count"]);
    assert_eq!(a("210 holder 1 - o"), ["holder"]);
    // the hold may have been lost in between
    assert_eq!(
        check(&[("s0g0", &format!("{A}210 count 1 0 1\n211 rel 1 drop"))]),
        [""; 0]
    );
}

#[test]
fn a_loss_is_final_and_reported_and_has_a_reason() {
    let foul = format!("{JOURNAL}\n50 fault 1300 link0 refuse 0 0 5 5 kept");
    let lost = |lines: &str| check_with(&foul, &[("s0g0", &format!("{A}{lines}"))]);
    // the last check relied on the hold until 1200
    assert_eq!(
        lost("1210 lost 1\n1211 told 1 Lost/LeaseExpired\n1212 rel 1 drop"),
        [""; 0]
    );
    assert_eq!(
        lost("1210 lost 1\n1611 told 1 Lost/LeaseExpired\n1612 rel 1 drop"),
        ["told late"]
    );
    assert_eq!(lost("1210 lost 1\n2612 rel 1 drop"), ["told late"]);
    assert_eq!(
        lost("1210 lost 1\n1611 told 1 Lost/LeaseExpired\n1611 agap 1220\n1612 rel 1 drop"),
        [""; 0]
    );
    assert_eq!(
        lost("1210 lost 1\n1211 told 1 Lost/LeaseExpired\n1212 rel 1 unlock\n1213 end 1 Ok"),
        ["unlock"]
    );
    assert_eq!(
        lost("1210 told 1 Lost/LeaseExpired\n1212 ok 1 1000000\n1213 rel 1 drop"),
        ["back again"]
    );
    // before the deadline, only a bug can have ended the hold
    assert_eq!(
        lost("700 lost 1\n701 told 1 Lost/RecordMissing\n702 rel 1 drop"),
        ["lost"]
    );
    assert_eq!(
        lost("210 rel 1 unlock\n215 end 1 NotHeld"),
        ["unlock", "error"]
    );
    // without a fault
    assert_eq!(
        check(&[(
            "s0g0",
            &format!("{A}1210 lost 1\n1211 told 1 Lost/LeaseExpired\n1212 rel 1 drop")
        )]),
        ["lost"]
    );
    let starved =
        format!("{A}1200 gap 500\n1210 lost 1\n1211 told 1 Lost/LeaseExpired\n1212 rel 1 drop");
    assert_eq!(check(&[("s0g0", &starved)]), [""; 0]);
}

#[test]
fn data_loss_of_a_server_is_reported() {
    let journal = "# mode=plain seed=1\n300 fault 305 server flushall 0 0 5 5 forgot";
    let until = |last: u64| {
        check_with(
            journal,
            &[(
                "s0g0",
                &format!("{A}{last} ok 1 1000000\n{} rel 1 drop", last + 1),
            )],
        )
    };
    // a third of the watchdog timeout, the command timeout, and 100 ms
    assert_eq!(until(1200), [""; 0]);
    assert_eq!(until(1210), ["told late"]);
    // its unlock does not find the record
    let unlock = |result: &str| {
        check_with(
            journal,
            &[("s0g0", &format!("{A}410 rel 1 unlock\n411 end 1 {result}"))],
        )
    };
    assert_eq!(unlock("Lost/RecordMissing"), [""; 0]);
    assert_eq!(unlock("Ok"), ["unlock"]);
    let foul = format!("{journal}\n310 fault 900 link0 delay-replies 0 0 5 5 kept");
    let until = |last: u64| {
        check_with(
            &foul,
            &[(
                "s0g0",
                &format!("{A}{last} ok 1 1000000\n{} rel 1 drop", last + 1),
            )],
        )
    };
    assert_eq!(until(1500), [""; 0]);
    assert_eq!(until(1515), ["told late"]);
}

#[test]
fn a_wait_over_its_limit_is_found_and_excused_by_starvation() {
    let wait = |end: u64, more: &str| {
        check(&[(
            "s0g0",
            &format!("100 call 1 s0g0c0t0 a mutex m alone bounded 50 - -\n{end} none 1\n{more}"),
        )])
    };
    assert_eq!(wait(210, ""), [""; 0]);
    assert_eq!(wait(217, ""), ["late"]);
    assert_eq!(wait(217, "200 gap 170"), [""; 0]);
    // for the client, a gap before the call was a round trip of 30 ms
    assert_eq!(wait(227, "90 gap 60"), [""; 0]);
    assert_eq!(wait(228, "90 gap 60"), ["late"]);
    let later = "1200 call 1 s0g0c0t0 a mutex m alone bounded 50 - -\n1317 none 1\n90 gap 60";
    assert_eq!(check(&[("s0g0", later)]), ["late"]);
    let foul = format!("{JOURNAL}\n50 fault 130 link0 delay-replies 0 0 5 5 kept");
    let history = "100 call 1 s0g0c0t0 a mutex m alone bounded 50 - -\n217 none 1";
    assert_eq!(check_with(&foul, &[("s0g0", history)]), [""; 0]);
    // during a fault, the round trip that the client knew of counts
    let knew = |end: u64, trip: u64| {
        let history = format!(
            "100 call 1 s0g0c0t0 a mutex m alone bounded 50 - -\n{end} trip 1 {trip}000\n{end} none 1"
        );
        check_with(&foul, &[("s0g0", &history)])
    };
    assert_eq!((knew(541, 0), knew(540, 0)), (vec!["late"], vec![]));
    // twice that, and three times 40 ms: something was settled first
    assert_eq!((knew(1211, 470), knew(1210, 470)), (vec!["late"], vec![]));
    // the fault of another client's link does not count
    assert_eq!(
        check_with(
            &foul.replace("delay-replies 0", "delay-replies 1"),
            &[("s0g0", history)]
        ),
        ["late"]
    );
}

#[test]
fn errors_need_a_fault_and_calls_an_end() {
    let fails = |error: &str| {
        format!("100 call 1 s0g0c0t0 a mutex m alone bounded 50 - -\n120 err 1 {error} text")
    };
    assert_eq!(check(&[("s0g0", &fails("Store/Unavailable"))]), ["error"]);
    let foul = format!("{JOURNAL}\n50 fault 130 link0 refuse 0 0 5 5 kept");
    assert_eq!(
        check_with(&foul, &[("s0g0", &fails("Store/Unavailable"))]),
        [""; 0]
    );
    assert_eq!(
        check_with(&foul, &[("s0g0", &fails("WrongLockKind"))]),
        ["error"]
    );
    let open = "100 call 1 s0g0c0t0 a mutex m alone unbounded - - -";
    assert_eq!(check(&[("s0g0", open)]), ["open"]);
    // the calls of a killed process never return
    assert_eq!(check(&[("s0g0", open), ("s0g1", "")]), [""; 0]);
    assert_eq!(
        check(&[(
            "s0g0",
            "100 call 1 s0g0c0t0 a mutex m alone calm 50 - -\n900 gone 1"
        )]),
        ["calm"]
    );
}

#[test]
fn a_busy_machine_makes_calls_fail_in_calm_but_the_lock_is_had() {
    let call = "100 call 1 s0g0c0t0 a mutex m alone calm 5000 - -";
    let again =
        "500 call 2 s0g0c0t0 a mutex m alone calm 4600 - -\n510 got 2 o -\n520 rel 2 unlock";
    let busy = "300 gap 200";
    let (fails, ends) = ("400 err 1 Store/Timeout text", "521 end 2 Ok");
    let check_all = |lines: &[&str]| check(&[("s0g0", &lines.join("\n"))]);
    assert_eq!(check_all(&[call, busy, fails, again, ends]), [""; 0]);
    assert_eq!(check_all(&[call, fails, again, ends]), ["error", "calm"]);
    assert_eq!(check_all(&[call, busy, fails]), ["calm"]);
    let wrong = "400 err 1 WrongLockKind text";
    assert_eq!(
        check_all(&[call, busy, wrong, again, ends]),
        ["error", "calm"]
    );
    // its release may fail as well
    let (late, unconfirmed) = ("600 gap 515", "610 end 2 Unconfirmed/Timeout");
    assert_eq!(
        check_all(&[call, busy, fails, again, late, unconfirmed]),
        [""; 0]
    );
    assert_eq!(
        check_all(&[
            "1500 call 2 s0g0c0t0 a mutex m alone calm 4600 - -\n1510 got 2 o -\n1520 rel 2 unlock\n1610 end 2 Unconfirmed/Timeout"
        ]),
        ["error", "calm"]
    );
}

#[test]
fn a_fair_lock_given_out_of_turn_is_found() {
    let hold = |who: &str, call: u64, got: u64| {
        format!(
            "{call} call 1 {who} {who} fair f alone unbounded - - -\n{got} got 1 o -\n{got} rel 1 drop"
        )
    };
    let sorts = |second: u64, more: &str| {
        check(&[
            ("s0g0", &format!("{}\n{more}", hold("s0g0c0t0", 100, 900))),
            ("s1g0", &hold("s1g0c0t0", second, 800)),
        ])
    };
    assert_eq!(sorts(400, ""), ["order"]);
    assert_eq!(sorts(300, ""), [""; 0]);
    assert_eq!(sorts(400, "600 gap 300"), [""; 0]);
    // a waiter that calls again soon after it gave up keeps its place; a later one does not
    let comes_again = |gave_up: u64| {
        let wait = gave_up - 150;
        let before = format!(
            "150 call 0 s1g0c0t0 s1g0c0t0 fair f alone bounded {wait} - -\n{gave_up} none 0\n"
        );
        check(&[
            ("s0g0", &hold("s0g0c0t0", 100, 900)),
            ("s1g0", &(before + &hold("s1g0c0t0", 400, 800))),
        ])
    };
    assert_eq!(
        (comes_again(390), comes_again(250)),
        (vec![], vec!["order"])
    );
}

#[test]
fn a_waiter_that_is_not_woken_is_found() {
    let first = "9000 call 1 s0g0c0t0 a mutex m alone unbounded - - -\n9001 got 1 o -\n9200 rel 1 unlock\n9201 end 1 Ok";
    let second = |got: u64, more: &str| {
        let history = format!(
            "9100 call 1 s1g0c0t0 b mutex m alone unbounded - - -\n{got} got 1 o -\n{got} rel 1 drop\n{more}"
        );
        check(&[("s0g0", first), ("s1g0", &history)])
    };
    assert_eq!(second(9490, ""), [""; 0]);
    assert_eq!(second(9510, ""), ["not woken"]);
    assert_eq!(second(9510, "9400 gap 9300"), [""; 0]);
    // a killed process does not wait
    let killed = "9050 call 1 s2g0c0t0 c mutex m alone unbounded - - -";
    let late =
        "9509 call 1 s1g0c0t0 b mutex m alone unbounded - - -\n9510 got 1 o -\n9510 rel 1 drop";
    assert_eq!(
        check(&[
            ("s0g0", first),
            ("s1g0", late),
            ("s2g0", killed),
            ("s2g1", "")
        ]),
        [""; 0]
    );
    let given = first.replace("unlock\n9201 end 1 Ok", "leave");
    let history =
        "9100 call 1 s1g0c0t0 b mutex m alone unbounded - - -\n9700 got 1 o -\n9700 rel 1 drop";
    assert_eq!(check(&[("s0g0", &given), ("s1g0", history)]), [""; 0]);
}
