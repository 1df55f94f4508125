//! `kiln-sim`: plays many schedules, and says which broke an invariant.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Instant;

use clap::Parser;
use kiln_sim::{Outcome, Stage};

/// Plays schedules of faults against Kiln's heart. Exit code 1: an invariant was broken.
#[derive(Parser)]
struct Args {
    /// How many schedules.
    #[arg(long, default_value_t = 1000)]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// This schedule alone.
    #[arg(long)]
    seed: Option<u64>,
    /// Every entry of the history, as it comes.
    #[arg(long)]
    trace: bool,
    /// kilnd's own log at this level (`debug`, `kiln=trace`).
    #[arg(long)]
    log: Option<String>,
    /// Schedules at a time; as many as there are processors if nothing is said.
    #[arg(long)]
    threads: Option<usize>,
    /// One JSON object for each failed schedule and one for the sum.
    #[arg(long)]
    json: bool,
    /// Stop at the first failure.
    #[arg(long)]
    fail_fast: bool,
}

#[derive(Default)]
struct Sum {
    passed: u64,
    failed: u64,
    events: u64,
    actions: u64,
    requests: u64,
    lives: u64,
    lasted: u64,
    faults: BTreeMap<&'static str, u64>,
    profiles: BTreeMap<&'static str, u64>,
    fewest_actions: Option<u32>,
}

impl Sum {
    fn add(&mut self, outcome: &Outcome) {
        match outcome.failure {
            None => self.passed += 1,
            Some(_) => self.failed += 1,
        }
        self.events += outcome.events as u64;
        self.actions += u64::from(outcome.actions);
        self.requests += outcome.requests;
        self.lives += u64::from(outcome.lives);
        self.lasted += outcome.lasted;
        *self.profiles.entry(outcome.profile).or_default() += 1;
        for (kind, count) in &outcome.faults {
            *self.faults.entry(kind).or_default() += count;
        }
        if outcome.failure.is_none() {
            let fewest = self.fewest_actions.unwrap_or(u32::MAX);
            self.fewest_actions = Some(fewest.min(outcome.actions));
        }
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(level) = &args.log {
        let filter = tracing_subscriber::EnvFilter::new(level);
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).without_time().init();
    }
    let stage = match Stage::new() {
        Ok(stage) => stage,
        Err(why) => {
            eprintln!("kiln-sim: {why}");
            return ExitCode::from(2);
        }
    };
    let (first, count) = args.seed.map_or((args.from, args.seeds), |seed| (seed, 1));
    let began = Instant::now();
    let mut sum = Sum::default();
    play_all(&stage, &args, first, count, |outcome| {
        sum.add(outcome);
        if outcome.failure.is_some() {
            tell_failure(outcome, args.json);
        }
        args.fail_fast && outcome.failure.is_some()
    });
    tell_sum(&sum, began.elapsed().as_secs_f64(), &args, first);
    if sum.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Until `see` has had enough.
fn play_all(stage: &Stage, args: &Args, first: u64, count: u64, mut see: impl FnMut(&Outcome) -> bool) {
    let threads = args.threads.or_else(|| std::thread::available_parallelism().ok().map(usize::from)).unwrap_or(1);
    let next = AtomicU64::new(first);
    let (outcomes, played) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..threads.min(count as usize).max(1) {
            let (outcomes, next) = (outcomes.clone(), &next);
            scope.spawn(move || {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + count || outcomes.send(stage.play(seed, args.trace)).is_err() {
                        return;
                    }
                }
            });
        }
        drop(outcomes);
        for outcome in played {
            if see(&outcome) {
                next.store(first + count, Ordering::Relaxed);
            }
        }
    });
}

fn tell_failure(outcome: &Outcome, json: bool) {
    let Some(failure) = &outcome.failure else { return };
    if json {
        let value = serde_json::json!({
            "seed": outcome.seed, "profile": outcome.profile, "invariant": failure.invariant, "why": failure.why,
            "at_ms": failure.at, "story": outcome.story,
        });
        return println!("{value}");
    }
    println!(
        "seed {} ({}): {} broken at {:.3} s: {}",
        outcome.seed,
        outcome.profile,
        failure.invariant,
        failure.at as f64 / 1000.0,
        failure.why
    );
    for line in &outcome.story {
        println!("    {line}");
    }
}

fn tell_sum(sum: &Sum, seconds: f64, args: &Args, first: u64) {
    let schedules = sum.passed + sum.failed;
    let rate = schedules as f64 / seconds.max(0.001);
    if args.json {
        let value = serde_json::json!({
            "schedules": schedules, "passed": sum.passed, "failed": sum.failed, "seconds": seconds,
            "schedules_per_second": rate, "events": sum.events, "actions": sum.actions, "requests": sum.requests,
            "lives": sum.lives, "virtual_seconds": sum.lasted / 1000, "faults": sum.faults, "profiles": sum.profiles,
        });
        return println!("{value}");
    }
    println!("schedules     {schedules} from seed {first}, {seconds:.1} s, {rate:.1} per second");
    println!(
        "from outside  {} actions, at least {} in each; {} requests",
        sum.actions,
        sum.fewest_actions.unwrap_or(0),
        sum.requests
    );
    println!(
        "history       {} entries; {} lives of kilnd; {} h of virtual time",
        sum.events,
        sum.lives,
        sum.lasted / 3_600_000
    );
    let list = |of: &BTreeMap<&str, u64>| of.iter().map(|(k, n)| format!("{n} {k}")).collect::<Vec<_>>().join(", ");
    println!("profiles      {}", list(&sum.profiles));
    println!("faults        {}", list(&sum.faults));
    println!("{} passed, {} failed", sum.passed, sum.failed);
}
