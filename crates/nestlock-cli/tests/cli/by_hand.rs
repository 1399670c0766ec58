//! `who`, `force`, `release`, `extend`.

use std::process::Stdio;

use crate::support::{World, until};

fn said(world: &World, args: &[&str]) -> (Option<i32>, String) {
    let output = world.output(args);
    (output.status.code(), String::from_utf8(output.stdout).unwrap())
}

#[test]
fn what_is_held_is_told_and_freed() {
    let world = World::new();
    assert_eq!(said(&world, &["who", "l"]), (Some(1), String::new()));
    assert_eq!(
        said(&world, &["who", "l", "--json"]),
        (Some(1), "{\"holders\":[],\"kind\":\"reentrant\",\"name\":\"l\",\"ttl_ms\":null,\"v\":1}\n".to_owned())
    );
    assert_eq!(said(&world, &["force", "l"]), (Some(1), String::new()));
    let line = format!("echo $NESTLOCK_OWNER > owner; {}", until("go"));
    let _holder = world.begin(&["exec", "l", "-c", &line], "owner");
    let owner = world.text("owner");
    let (code, told) = said(&world, &["who", "l"]);
    assert!(code == Some(0) && told.starts_with(&format!("{owner} 1 ")), "{told}");
    // whose it is: the shell's, of this machine
    let words: Vec<&str> = told.split_whitespace().collect();
    assert!(words[2].ends_with("ms") && words[3] == "sh" && words[5].parse::<u32>().is_ok(), "{told}");
    let (_, told) = said(&world, &["who", "l", "--json"]);
    for part in
        [format!("\"owner\":\"{owner}\""), "\"application\":\"sh\"".into(), format!("\"process\":\"{}\"", words[5])]
    {
        assert!(told.contains(&part), "{part}: {told}");
    }

    let nobody = "11111111-2222-3333-4444-555555555555:1";
    for args in [&["release", "l", "--owner", nobody][..], &["extend", "l", "1m", "--owner", nobody]] {
        assert_eq!(said(&world, args), (Some(1), String::new()), "{args:?}");
    }
    assert_eq!(said(&world, &["force", "l", "--if-owner", nobody]), (Some(1), String::new()));
    assert_eq!(world.code(&["who", "l"]), 0, "it is as it was");
    assert_eq!(said(&world, &["extend", "l", "5m", "--owner", &owner]), (Some(0), String::new()));
    let ttl = said(&world, &["who", "l"]).1;
    assert!(ttl.split(' ').nth(2).unwrap().trim_end_matches("ms").parse::<u64>().unwrap() > 200_000, "{ttl}");
    let (code, freed) = said(&world, &["force", "l", "--if-owner", &owner]);
    assert_eq!((code, freed), (Some(0), format!("freed l {owner}\n")));
    assert_eq!(world.code(&["who", "l"]), 1);
}

#[test]
fn a_lock_of_another_kind_is_told_and_left_alone() {
    let world = World::new();
    assert_eq!(world.server_says(&["SET", "l", "text"]), "+OK\r\n");
    assert_eq!(said(&world, &["force", "l"]).0, Some(125));
    assert_eq!(world.server_says(&["GET", "l"]), "$4\r\ntext\r\n");
}

/// As `nestlock who l | true`: no word of it, and no panic.
#[test]
fn whoever_reads_may_have_enough() {
    let world = World::new();
    let line = format!("echo held > held; {}", until("go"));
    let _holder = world.begin(&["exec", "l", "-c", &line], "held");
    let mut who = world.nestlock(&["who", "l"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(who.stdout.take());
    let output = who.wait_with_output().unwrap();
    assert_eq!((output.status.code(), String::from_utf8(output.stderr).unwrap()), (Some(141), String::new()));
}
