//! Deterministic simulation: the shipped library and scripts, fred and tokio, in virtual time. See
//! README.md.

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
compile_error!(
    "the simulator needs Linux on x86-64; everything else: cargo test --workspace --exclude nestlock-sim"
);

mod app;
mod checks;
mod children;
mod clock;
mod context;
mod faults;
mod kernel;
mod kinds;
mod ledger;
mod memory;
mod nemesis;
mod net;
mod numbers;
mod orders;
mod plan;
mod process;
mod queues;
mod rng;
mod sockets;
mod symbols;
mod task;
mod trace;
mod turn;
mod workload;
mod world;

use std::{
    process::{Command, ExitCode},
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use faults::Fault;
use kinds::{KINDS, Kind};
use plan::Plan;

#[global_allocator]
static MEMORY: memory::Memory = memory::Memory;

/// The options of the command line.
#[derive(Debug, Clone)]
struct Options {
    kinds: Vec<(&'static str, Kind)>,
    first: u64,
    seeds: u64,
    seconds: u64,
    faults: bool,
    /// Replaces the seed's mix of faults, if not empty.
    mix: Vec<Fault>,
    trace: bool,
    jobs: usize,
    is_child: bool,
}

impl Options {
    fn read(args: &[String]) -> Result<Self, String> {
        let mut options = Self {
            kinds: KINDS.to_vec(),
            first: 1,
            seeds: 1,
            seconds: 60,
            faults: true,
            mix: Vec::new(),
            trace: false,
            jobs: std::thread::available_parallelism().map_or(1, usize::from),
            is_child: false,
        };
        for arg in args {
            let (name, value) = arg.split_once('=').unwrap_or((arg, ""));
            let number = || {
                value
                    .parse::<u64>()
                    .map_err(|error| format!("{arg}: {error}"))
            };
            match name {
                "kind" => {
                    let kind = value.parse::<Kind>()?;
                    options.kinds.retain(|(_, other)| *other == kind);
                }
                "seed" => (options.first, options.seeds) = (number()?, 1),
                "first" => options.first = number()?,
                "seeds" => options.seeds = number()?,
                "seconds" => options.seconds = number()?,
                "fault" => {
                    let fault = Fault::ALL
                        .into_iter()
                        .find(|fault| format!("{fault:?}") == value);
                    options.mix.push(fault.ok_or_else(|| {
                        format!("unknown fault {arg}; the faults are {:?}", Fault::ALL)
                    })?);
                }
                "faults" => options.faults = number()? > 0,
                "jobs" => options.jobs = number()? as usize,
                "trace" => options.trace = true,
                "child" => options.is_child = true,
                _ => {
                    return Err(format!(
                        "unknown argument {arg}; see crates/nestlock-sim/README.md"
                    ));
                }
            }
        }
        Ok(options)
    }
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match Options::read(&args) {
        Ok(options) if options.is_child => one(&options),
        Ok(options) => all(&options),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs one seed in a process of its own, so that each run has the same task numbers and the same
/// keys of hash maps.
fn one(options: &Options) -> ExitCode {
    // a seed that hangs has failed: the signal ends it after 120 s
    // SAFETY: it takes no pointers
    unsafe { libc::alarm(120) };
    // the C library allocates as well: as one thread runs at a time, none needs an arena of its own
    // SAFETY: it takes no pointers
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    let tell = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        kernel::stop();
        tell(panic);
        // SAFETY: nothing is left to do
        unsafe { libc::_exit(101) };
    }));
    let (seed, kind) = (options.first, options.kinds[0].1);
    let mut plan = Plan::new(seed, kind, options.seconds, options.faults);
    if !options.mix.is_empty() {
        plan.faults.clone_from(&options.mix);
    }
    if options.trace {
        println!("{plan:#?}");
    }
    let started = Instant::now();
    let clocks = plan.clocks();
    kernel::start(seed, clocks, plan.interruptions, options.trace);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    net::with(|net| net.begin(&plan));
    tokio::task::LocalSet::new().block_on(&runtime, workload::run(&plan));
    let (sum, steps) = trace::sum();
    let simulated = clock::now() / clock::SECOND;
    kernel::stop();
    let (requests, late) = net::with(|net| (net.requests, net.late));
    let (counts, wrong) = ledger::book(|book| (book.counts.clone(), book.wrong.clone()));
    println!(
        "{} seed {seed}: {sum:016x} {simulated} s in {:.3} s, {steps} steps, {requests} requests ({late} late), {counts:?}",
        options.kinds[0].0,
        started.elapsed().as_secs_f64(),
    );
    for wrong in wrong.iter().take(5) {
        println!("  WRONG {wrong}");
    }
    // exits without cleaning up, as the other threads never end
    // SAFETY: nothing is left to do
    unsafe { libc::_exit(i32::from(!wrong.is_empty())) }
}

/// Runs many seeds, each in a process of its own.
fn all(options: &Options) -> ExitCode {
    let program = std::env::current_exe().expect("this program");
    let started = Instant::now();
    let mut failed = 0;
    for (name, _) in &options.kinds {
        let (next, began, spent_before) = (
            AtomicU64::new(options.first),
            Instant::now(),
            children::spent_by_children(),
        );
        let found = Mutex::new((Vec::<u64>::new(), 0_u64, 0_u64));
        std::thread::scope(|scope| {
            for job in 0..options.jobs {
                let (next, found, program) = (&next, &found, &program);
                scope.spawn(move || {
                    loop {
                        let seed = next.fetch_add(1, Ordering::Relaxed);
                        if seed >= options.first + options.seeds {
                            return;
                        }
                        let mut child = Command::new(program);
                        child.args(["child", &format!("kind={name}"), &format!("seed={seed}")]);
                        child.arg(format!("seconds={}", options.seconds));
                        child.arg(format!("faults={}", u8::from(options.faults)));
                        child.args(options.mix.iter().map(|fault| format!("fault={fault:?}")));
                        if options.trace {
                            child.arg("trace");
                        }
                        children::pin(&mut child, job);
                        let output = child.output().expect("this program runs");
                        let text = String::from_utf8_lossy(&output.stdout);
                        let line = text.lines().find(|line| line.starts_with(&format!("{name} seed {seed}: ")));
                        let sum = line.and_then(|line| u64::from_str_radix(line.split(' ').nth(3)?, 16).ok());
                        let simulated = line.and_then(|line| line.split(' ').nth(4)?.parse::<u64>().ok());
                        let mut found = found.lock().expect("no thread panics");
                        found.1 = found.1.wrapping_add(sum.unwrap_or_default());
                        found.2 += simulated.unwrap_or_default();
                        if !output.status.success() {
                            found.0.push(seed);
                            print!("{}", if options.trace { "" } else { &text });
                            let mix: Vec<String> =
                                options.mix.iter().map(|fault| format!("fault={fault:?} ")).collect();
                            let mix = mix.concat();
                            println!(
                                "  FAILED: nestlock-sim kind={name} seed={seed} seconds={} faults={} {mix}trace",
                                options.seconds,
                                u8::from(options.faults),
                            );
                            eprint!("{}", String::from_utf8_lossy(&output.stderr));
                        }
                        if options.seeds == 1 || options.trace {
                            print!("{text}");
                        }
                    }
                });
            }
        });
        let spent = children::spent_by_children();
        let (seeds, sum, simulated) = found.into_inner().expect("no thread panics");
        failed += seeds.len();
        let took = began.elapsed();
        println!(
            "{name}: {} seeds, {} failed, {simulated} s simulated in {:.1} s, {:.0} seeds a minute and core, sum {sum:016x}",
            options.seeds,
            seeds.len(),
            took.as_secs_f64(),
            options.seeds as f64 / (spent - spent_before).max(0.001) * 60.0,
        );
    }
    println!("{failed} failed, {:.1} s", started.elapsed().as_secs_f64());
    if failed > 0 {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}
