//! `lua/note`: each line under "Returns", each refusal, each script sent twice.

use super::{Bench, NO_LEASES};
use crate::support::wire::Reply;

const NOTE: &str = "nestlock_note:{l}:0a1b2c3d-1111-4222-8333-444455556666:42";
const OTHER: &str = "nestlock_note:{l}:0a1b2c3d-1111-4222-8333-444455556666:43";
const WRITE: &str = "note/write";
const ERASE: &str = "note/erase";
const READ: &str = "note/read";

impl Bench {
    fn note_written(&self, life: &str, turn: &str, text: &str) -> Reply {
        let reply = self.run(WRITE, &[NOTE], &[life, turn, text]);
        let again = self.run(WRITE, &[NOTE], &[life, turn, text]);
        assert_eq!(again, reply, "the same reply");
        reply
    }

    fn note(&self) -> String {
        let reply = self.untouched(READ, &[NOTE], &[]);
        reply.list()[0].text().to_owned()
    }
}

#[test]
fn note_is_written_again_with_a_new_ttl() {
    let bench = Bench::new();
    assert_eq!(bench.note_written("20000", "7", "import"), Reply::Int(1));
    assert_eq!(bench.note(), "7 import");
    assert_eq!(bench.note_written("90000", "7", "import"), Reply::Int(1));
    let ttl = bench.call(&["PTTL", NOTE]).int();
    assert!((80_000..=90_000).contains(&ttl), "{ttl}");
}

/// What arrives late is about an earlier hold of the same owner.
#[test]
fn note_of_a_later_hold_stays() {
    let bench = Bench::new();
    bench.note_written("20000", "9", "first");
    assert_eq!(bench.note_written("20000", "10", "second"), Reply::Int(1));
    let late = ["20000", "9", "first"];
    assert_eq!(bench.untouched(WRITE, &[NOTE], &late), Reply::Int(-1));
    assert_eq!(bench.untouched(ERASE, &[NOTE], &["9"]), Reply::Nil);
    assert_eq!(bench.note(), "10 second");
    assert_eq!(bench.run(ERASE, &[NOTE], &["10"]), Reply::Int(1));
    assert_eq!(bench.untouched(ERASE, &[NOTE], &["10"]), Reply::Nil);
    assert_eq!(bench.snapshot(), []);
}

#[test]
fn note_of_each_holder_is_read() {
    let bench = Bench::new();
    bench.note_written("20000", "7", "import");
    bench.set_up(&["SET", OTHER, "of another program"]);
    let read = bench.untouched(READ, &[OTHER, "nestlock_note:{l}:none", NOTE], &[]);
    let texts: Vec<_> = read.list().iter().map(Reply::text).collect();
    assert_eq!((texts[0], texts[1]), ("of another program", ""));
    assert!(texts[2] == "7 import", "{texts:?}");
    // it has no turn, so it counts as none
    assert_eq!(bench.untouched(ERASE, &[OTHER], &["7"]), Reply::Nil);
}

#[test]
fn note_refuses_what_is_no_number_or_no_string() {
    let bench = Bench::new();
    for bad in NO_LEASES {
        // the server itself refuses a life that it cannot count
        let args = [[bad, "7", "n"], ["20000", bad, "n"]];
        for args in args {
            let refused = bench.untouched(WRITE, &[NOTE], &args);
            assert!(refused.is_error(), "{args:?}: {refused:?}");
        }
    }
    bench.set_up(&["HSET", NOTE, "a", "b"]);
    for (script, args) in [(WRITE, &["20000", "7", "n"][..]), (ERASE, &["7"])] {
        let refused = bench.untouched(script, &[NOTE], args);
        assert!(refused.is_error(), "{script}: {refused:?}");
    }
    let read = bench.untouched(READ, &[NOTE], &[]);
    assert_eq!(read.list()[0].text(), "", "other holders may have notes");
}
