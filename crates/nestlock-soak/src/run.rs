//! A run: servers, proxies, processes, faults, calm; then the verdict.

use std::{fs, path::Path, sync::Arc, thread, time::Duration};

use crate::{
    check::{self, Violation},
    clock::{SECOND, now, sleep_until, wait_for},
    handover, heartbeat,
    history::{History, JOURNAL},
    kinds::PERMITS,
    nemesis::{self, Lane, Nemesis, Processes},
    servers::Servers,
    settings::{FAIR_PATIENCE, LONGEST_WATCHDOG, Mode, Settings},
};

/// Runs all modes of the settings. Returns `true` if no violation was found.
pub(crate) fn run(settings: &Settings) -> Result<bool, String> {
    let mut good = true;
    for mode in &settings.modes {
        let mut part = settings.clone();
        if settings.modes.len() > 1 {
            // none gets 1/5 of the time, aof and plain 2/5 each
            part.seconds = (settings.seconds * if *mode == Mode::None { 1 } else { 2 }).div_ceil(5);
        }
        println!(
            "seed {}: nestlock-soak run {}",
            settings.seed,
            part.words(*mode)
        );
        good &= one(&part, *mode)?;
    }
    Ok(good)
}

/// Checks the histories of a folder again.
pub(crate) fn check_again(folder: &Path) -> Result<bool, String> {
    let report = check::check(folder, Vec::new())?;
    println!("{report}");
    Ok(report.violations.is_empty())
}

fn one(settings: &Settings, mode: Mode) -> Result<bool, String> {
    let folder = std::env::temp_dir().join(format!(
        "nestlock-soak-{}-{}",
        std::process::id(),
        mode.name()
    ));
    fs::create_dir_all(handover::folder(&folder)).map_err(|error| error.to_string())?;
    let wrong = play(settings, mode, &folder)?;
    let report = check::check(&folder, wrong)?;
    println!("{report}");
    let good = report.violations.is_empty();
    if good && !settings.keep {
        let _ = fs::remove_dir_all(&folder);
    } else {
        println!("the histories are in {}", folder.display());
    }
    Ok(good)
}

/// Plays a run. Returns the violations that no history shows.
fn play(settings: &Settings, mode: Mode, folder: &Path) -> Result<Vec<Violation>, String> {
    let text = |error: std::io::Error| error.to_string();
    let schedule = match &settings.schedule {
        Some(path) => nemesis::read_schedule(path).map_err(text)?,
        None => Vec::new(),
    };
    let servers = Servers::start(settings, mode)?;
    fs::write(
        folder.join(JOURNAL),
        format!("# {}\n", settings.words(mode)),
    )
    .map_err(text)?;
    let journal = History::open(&folder.join(JOURNAL)).map_err(text)?;
    let own = Arc::new(History::open(&folder.join("run.history")).map_err(text)?);
    heartbeat::of_the_process(Arc::clone(&own));
    servers.watch(&own);
    // the processes begin as soon as they are connected
    let epoch = now();
    journal.write_at(epoch, "epoch");
    let until = epoch + settings.seconds * SECOND;
    let mut processes =
        Processes::start(settings, mode, &servers, folder.to_owned(), until).map_err(text)?;
    let mut wrong = Vec::new();
    for worker in &mut processes.workers {
        if !worker.wait_for("ready", epoch + 30 * SECOND) {
            return Err(format!("{} does not begin", worker.name));
        }
    }
    let nemesis = Nemesis {
        settings,
        mode,
        servers: &servers,
        journal: &journal,
        epoch,
        until,
        schedule,
    };
    thread::scope(|scope| {
        for lane in [Lane::Link(0), Lane::Link(1), Lane::Server] {
            let nemesis = &nemesis;
            scope.spawn(move || nemesis.run(lane, None));
        }
        // on this thread, as a process ends with the thread that started it
        nemesis.run(Lane::Process, Some(&mut processes));
    });
    sleep_until(until);
    servers
        .proxies
        .iter()
        .flatten()
        .for_each(crate::support::proxy::Proxy::heal);
    journal.write("calm");
    calm(
        &servers,
        &mut processes,
        settings.patience * SECOND,
        &mut wrong,
    );
    Ok(wrong)
}

fn calm(servers: &Servers, processes: &mut Processes, patience: u64, wrong: &mut Vec<Violation>) {
    let (begin, count) = (now(), servers.servers.len());
    let mut say = |text: String| wrong.push(Violation::of_the_run(now(), text));
    let mut all_alive = true;
    for (order, answers) in [
        (None, &["settled"][..]),
        (Some("calm"), &["calmed", "idle"]),
    ] {
        for worker in &mut processes.workers {
            if let Some(order) = order {
                worker.order(order);
            }
        }
        for worker in &mut processes.workers {
            for what in answers {
                if !worker.wait_for(what, begin + patience) {
                    say(format!(
                        "process {} does not get to {what:?}, or has ended before",
                        worker.name
                    ));
                    all_alive = false;
                    break;
                }
            }
        }
        if !all_alive {
            break;
        }
    }
    for server in 0..count {
        if all_alive && !wait_for(3 * SECOND, || servers.channels(server).is_empty()) {
            say(format!(
                "server {server} has subscribers of {:?}",
                servers.channels(server)
            ));
        }
    }
    for worker in &mut processes.workers {
        worker.order("end");
    }
    for worker in &mut processes.workers {
        let ended = !all_alive || worker.wait_for("ended", now() + 20 * SECOND);
        let status = if all_alive {
            worker.wait_for_the_end(10 * SECOND)
        } else {
            None
        };
        if all_alive && !(ended && status.is_some_and(|status| status.success())) {
            say(format!(
                "process {} does not end in order: {status:?}",
                worker.name
            ));
        }
        worker.kill();
        for text in worker.wrong.drain(..) {
            say(format!("process {}: {text}", worker.name));
        }
    }
    // unsettled requests end with their leases, queue entries with their patience
    let leases = LONGEST_WATCHDOG + FAIR_PATIENCE + Duration::from_secs(2);
    for (name, available, taken) in servers.permits() {
        if available + taken != i64::from(PERMITS) {
            say(format!(
                "{name}: {available} permits available and {taken} taken"
            ));
        }
    }
    for server in 0..count {
        if !wait_for(leases.as_nanos() as u64, || servers.keys(server).is_empty()) {
            say(format!(
                "server {server} still has {:?}",
                servers.keys(server)
            ));
        }
    }
}
