//! What a process has used, by the kernel's accounts.

use std::fs;
use std::time::Duration;

use crate::Outcome;

/// Of all its threads that live.
pub(crate) fn processor_time(pids: &[u32]) -> Outcome<Duration> {
    let mut nanoseconds = 0;
    for pid in pids {
        for task in fs::read_dir(format!("/proc/{pid}/task"))? {
            let account = fs::read_to_string(task?.path().join("schedstat"))?;
            nanoseconds += account.split(' ').next().unwrap_or_default().parse::<u64>()?;
        }
    }
    Ok(Duration::from_nanos(nanoseconds))
}

/// Its share of the memory that it uses, in bytes.
pub(crate) fn memory(pids: &[u32]) -> Outcome<f64> {
    let mut sum = 0.0;
    for pid in pids {
        let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
        let line = text.lines().find_map(|line| line.strip_prefix("Pss:")).ok_or("no Pss")?;
        sum += line.trim().trim_end_matches(" kB").parse::<f64>()? * 1024.0;
    }
    Ok(sum)
}

pub(crate) fn descriptors(pids: &[u32]) -> Outcome<f64> {
    let mut sum = 0;
    for pid in pids {
        sum += fs::read_dir(format!("/proc/{pid}/fd"))?.count();
    }
    Ok(sum as f64)
}
