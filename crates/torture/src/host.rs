//! The daemons, as the host has them: processes, or instances of a private Incus.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

/// Incus on a machine that builds.
const LOOK: Duration = Duration::from_secs(60);

pub(crate) struct Host {
    home: PathBuf,
    incus: Option<PathBuf>,
}

/// Which run of which daemon, by key. More than one of a key is told of as it is.
pub(crate) type Daemons = BTreeMap<String, Vec<String>>;

impl Host {
    pub(crate) const fn new(home: PathBuf, incus: Option<PathBuf>) -> Self {
        Self { home, incus }
    }

    /// Those that run now.
    pub(crate) async fn daemons(&self) -> Result<Daemons, String> {
        match &self.incus {
            None => Ok(self.processes()),
            Some(directory) => instances(directory).await,
        }
    }

    fn processes(&self) -> Daemons {
        let below = format!("{}/", self.home.display());
        let entries = fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
        let mut seen: Vec<(String, String, Process)> = Vec::new();
        for pid in entries.filter_map(|entry| entry.file_name().into_string().ok()) {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let words: Vec<String> = line.split(|byte| *byte == 0).map(|w| String::from_utf8_lossy(w).into()).collect();
            let is_daemon = words.first().is_some_and(|program| program.ends_with("/buildkitd"));
            let root = words.iter().skip_while(|word| *word != "--root").nth(1).filter(|root| root.starts_with(&below));
            // …/live/KEY/cache
            let key = root.and_then(|root| root.split('/').rev().nth(1));
            // A process that is gone by now has no start time.
            if let (true, Some(key), Some(process)) = (is_daemon, key, process(&pid)) {
                seen.push((key.to_owned(), pid, process));
            }
        }
        // What a daemon starts bears the daemon's name and words until it is the program that it is to be.
        let is_child = |process: &Process| seen.iter().any(|(_, pid, _)| *pid == process.parent);
        let mut found = Daemons::new();
        for (key, pid, process) in seen.iter().filter(|(_, _, process)| !is_child(process)) {
            found.entry(key.clone()).or_default().push(format!("process {pid} since {}", process.started));
        }
        found
    }
}

struct Process {
    parent: String,
    /// In ticks since boot.
    started: String,
}

/// `None` also of a zombie.
fn process(pid: &str) -> Option<Process> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    fields.first().filter(|state| **state != "Z")?;
    Some(Process { parent: (*fields.get(1)?).to_owned(), started: (*fields.get(19)?).to_owned() })
}

async fn instances(directory: &PathBuf) -> Result<Daemons, String> {
    let list = Command::new("incus")
        .args(["list", "--project", "kiln", "--columns", "nsp", "--format", "csv"])
        .env("INCUS_DIR", directory)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(LOOK, list).await.map_err(|_| "incus list does not end".to_owned())?;
    let output = output.map_err(|error| format!("incus list: {error}"))?;
    if !output.status.success() {
        return Err(format!("incus list: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    let mut found = Daemons::new();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let fields: Vec<&str> = line.split(',').collect();
        if let [name, "RUNNING", pid] = fields[..] {
            let key = name.rsplit('-').next().unwrap_or(name);
            found.entry(key.to_owned()).or_default().push(format!("init {pid}"));
        }
    }
    Ok(found)
}
