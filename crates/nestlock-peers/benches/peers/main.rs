//! Compares nestlock with other locks, in Rust and other languages: in each round of a run, all
//! take turns. Writes the figures to `docs/peers.json`, and draws `docs/*.svg` from that file.
//! Needs Linux, to measure the resources of processes.
//!
//! Run: `make peers`, or
//! `cargo bench -p nestlock-peers --bench peers -- rounds=3 seconds=0.3 only=nestlock,rslock`.
//! `cargo bench -p nestlock-peers --bench peers -- draw` only draws.
#![allow(missing_docs, clippy::print_stdout, clippy::cast_precision_loss)]

mod contenders;
mod draw;
mod figures;
mod process;
mod run;
mod worker;

#[path = "../../../../benches/support/scripts.rs"]
mod scripts;
#[path = "../stats/mod.rs"]
mod stats;

use std::{fs, path::PathBuf, time::Duration};

use figures::Figures;
use run::Plan;

/// Returns the workspace's folder.
fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn main() {
    // cargo adds `--bench`
    let args: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| arg != "--bench")
        .collect();
    match args.first().map(String::as_str) {
        Some("worker") => return worker::run(&args[1]),
        Some("draw") => {}
        _ => measure(&args),
    }
    let text = fs::read_to_string(root().join("docs/peers.json"))
        .expect("docs/peers.json, which a run writes");
    let figures: Figures = serde_json::from_str(&text).expect("figures");
    for file in draw::all(&figures, &root().join("docs")) {
        println!("docs/{file}");
    }
}

fn measure(args: &[String]) {
    let mut plan = Plan {
        rounds: 9,
        time: Duration::from_secs(1),
        only: Vec::new(),
    };
    for arg in args {
        match arg.split_once('=') {
            Some(("rounds", text)) => plan.rounds = text.parse().expect("rounds=NUMBER"),
            Some(("seconds", text)) => {
                plan.time = Duration::from_secs_f64(text.parse().expect("seconds=NUMBER"));
            }
            Some(("only", text)) => plan.only = text.split(',').map(str::to_owned).collect(),
            _ => panic!("unknown argument {arg}: use draw, or rounds=, seconds=, only="),
        }
    }
    let figures = run::run(&plan);
    figures.print();
    let text = serde_json::to_string_pretty(&figures).expect("JSON");
    let folder = root().join("docs");
    fs::create_dir_all(&folder).expect("a folder");
    fs::write(folder.join("peers.json"), text + "\n").expect("a file");
}
