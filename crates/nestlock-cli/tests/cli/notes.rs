//! Notes of holders: `exec --note`, and what the other commands show of them.

use serde_json::Value;

use crate::support::{Running, World, eventually, until};

/// Starts a holder of the lock `l` with this note, and returns once the server has the note.
fn holder(world: &World, note: &str) -> Running {
    let line = format!("echo $NESTLOCK_OWNER > held; {}", until("go"));
    let running = world.begin(&["exec", "l", "--note", note, "-c", &line], "held");
    let key = format!("nestlock_note:{{l}}:{}", world.text("held"));
    eventually("the note is there", || {
        world.server_says(&["EXISTS", &key]) == ":1\r\n"
    });
    running
}

#[test]
fn a_note_is_shown_by_each_command() {
    let world = World::new();
    let holder = holder(&world, "nightly import");
    let (_, line, _) = world.said(&["who", "l"]);
    assert!(line.trim_end().ends_with("s nightly import"), "{line}");
    for command in ["who", "ls"] {
        let json: Value = serde_json::from_str(&world.said(&[command, "l", "--json"]).1).unwrap();
        let holder = &json["holders"][0];
        assert_eq!(
            (holder["note"].as_str(), holder["application"].as_str()),
            (Some("nightly import"), Some("sh")),
            "{json}"
        );
        assert!(
            holder["since_ms"].as_u64() > Some(1_700_000_000_000),
            "{json}"
        );
        assert!(
            holder["process"]
                .as_str()
                .is_some_and(|id| id.parse::<u32>().is_ok())
        );
    }
    let (code, said, why) = world.said(&["exec", "l", "-n", "--", "true"]);
    assert_eq!((code, &*said), (Some(75), ""));
    assert!(
        why.starts_with("nestlock: busy: held for ")
            && why.trim_end().ends_with(": nightly import"),
        "{why}"
    );
    world.make("go");
    assert_eq!(holder.code(), Some(0));
}

/// A writer asks the readers, and a reader the writer.
#[test]
fn a_note_is_told_to_the_other_half() {
    for (holds, asks) in [("read", "write"), ("write", "read")] {
        let world = World::new();
        let line = format!("echo $NESTLOCK_OWNER > held; {}", until("go"));
        let args = [
            "exec", "l", "--kind", holds, "--note", "a report", "-c", &line,
        ];
        let _holder = world.begin(&args, "held");
        let told = || {
            let (code, _, why) = world.said(&["exec", "l", "--kind", asks, "-n", "--", "true"]);
            code == Some(75) && why.trim_end().ends_with(": a report")
        };
        eventually("it is told", told);
    }
}

#[test]
fn a_holder_without_a_note_has_none() {
    let world = World::new();
    let _holder = world.hold("l", "reentrant");
    for command in ["who", "ls"] {
        let json: Value = serde_json::from_str(&world.said(&[command, "l", "--json"]).1).unwrap();
        let holder = &json["holders"][0];
        assert!(
            holder["note"].is_null() && holder["since_ms"].is_null(),
            "{json}"
        );
    }
    let (code, _, why) = world.said(&["exec", "l", "-n", "--", "true"]);
    assert_eq!((code, &*why), (Some(75), ""));
}

#[test]
fn a_note_that_is_no_line_is_refused() {
    let world = World::new();
    let (code, _, why) = world.said(&["exec", "l", "--note", "a\nb", "--", "touch", "begun"]);
    assert!(
        code == Some(64) && why.contains("one line"),
        "{code:?} {why}"
    );
    assert!(!world.exists("begun"));
}
