//! Runs buildkitd, reaps whatever dies in the container, and forwards the wish to stop.

use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process, waitpid};

pub(crate) const BUILDKITD: &str = "/usr/local/bin/buildkitd";
const ARGUMENTS: [&str; 4] = ["--config", "/etc/kiln/buildkitd.toml", "--root", "/var/lib/buildkit"];

/// Incus asks with SIGPWR, other managers with SIGTERM, a person at the console with SIGINT.
const STOP: [i32; 3] = [libc::SIGPWR, libc::SIGTERM, libc::SIGINT];

#[derive(Debug)]
pub(crate) enum End {
    /// Somebody wanted it to stop, and it did.
    Asked,
    ByItself(String),
}

/// The signals pid 1 acts on. They are blocked and then awaited, so there is no handler and nothing to race with.
pub(crate) struct Signals(libc::sigset_t);

impl Signals {
    /// Children inherit this: see [`with_nothing_blocked`].
    pub(crate) fn block() -> io::Result<Self> {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: `sigemptyset` initialises the set it is given, and `sigaddset` changes an initialised one; both and
        // `pthread_sigmask` only use the pointers during the call.
        unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for signal in STOP.into_iter().chain([libc::SIGCHLD]) {
                libc::sigaddset(set.as_mut_ptr(), signal);
            }
            match libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut()) {
                0 => Ok(Self(set.assume_init())),
                error => Err(io::Error::from_raw_os_error(error)),
            }
        }
    }

    /// The next of them, or `None` when `patience` is over.
    fn next(&self, patience: Duration) -> Option<i32> {
        let patience = libc::timespec {
            tv_sec: patience.as_secs().try_into().unwrap_or(libc::time_t::MAX),
            tv_nsec: patience.subsec_nanos().into(),
        };
        // SAFETY: both pointers are valid for the call; a null pointer for the details is allowed.
        let signal = unsafe { libc::sigtimedwait(&raw const self.0, std::ptr::null_mut(), &raw const patience) };
        (signal > 0).then_some(signal)
    }
}

pub(crate) fn run(signals: &Signals, drain: Duration) -> io::Result<End> {
    let child = with_nothing_blocked(&mut Command::new(BUILDKITD))
        .args(ARGUMENTS)
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        .env("HOME", "/root")
        .env_remove("KILN_RESOLVERS")
        .env_remove("KILN_DRAIN_SECONDS")
        .spawn()?;
    // Reaped below with all the others, not through `child`.
    let daemon = Pid::from_child(&child);
    let mut deadline: Option<Instant> = None;
    loop {
        let patience = deadline.map_or(Duration::from_hours(1), |at| at.saturating_duration_since(Instant::now()));
        match signals.next(patience) {
            Some(libc::SIGCHLD) => {
                if let Some(status) = reap(daemon) {
                    let end = End::ByItself(describe(status));
                    return Ok(if deadline.is_some() { End::Asked } else { end });
                }
            }
            Some(_) if deadline.is_none() => {
                eprintln!("kiln-init: asked to stop; buildkitd has {} s to finish its builds", drain.as_secs());
                deadline = Some(Instant::now() + drain);
                send(daemon, Signal::TERM);
            }
            None if deadline.is_some_and(|at| Instant::now() >= at) => {
                eprintln!("kiln-init: buildkitd is not done after {} s; killing it", drain.as_secs());
                send(daemon, Signal::KILL);
                deadline = Some(Instant::now() + Duration::from_secs(5));
            }
            // Asked again: a second TERM would make buildkitd drop what it drains. Or nothing was asked at all.
            Some(_) | None => {}
        }
    }
}

/// buildkitd hands the mask that it was started with down to the steps of builds: with SIGTERM blocked, `timeout` ends
/// nothing in there.
fn with_nothing_blocked(command: &mut Command) -> &mut Command {
    let unblock = || {
        let mut none = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: `sigemptyset` initialises the set it is given, and `pthread_sigmask` reads an initialised one; both
        // only use the pointers during the call.
        let error = unsafe {
            libc::sigemptyset(none.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut())
        };
        if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error)) }
    };
    // SAFETY: it runs between fork and exec, and calls only what is async-signal-safe; an error with a number of the
    // system's allocates nothing.
    unsafe { command.pre_exec(unblock) }
}

/// Collects every child that has died; the daemon's status if it is among them.
fn reap(daemon: Pid) -> Option<WaitStatus> {
    let mut found = None;
    while let Ok(Some((pid, status))) = waitpid(None, WaitOptions::NOHANG) {
        if pid == daemon {
            found = Some(status);
        }
    }
    found
}

fn send(daemon: Pid, signal: Signal) {
    if let Err(error) = kill_process(daemon, signal) {
        eprintln!("kiln-init: cannot signal buildkitd: {error}");
    }
}

fn describe(status: WaitStatus) -> String {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (_, Some(signal)) => format!("killed by signal {signal}"),
        _ => format!("{status:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_blocked_here_is_not_blocked_in_the_daemon() {
        let blocked = |command: &mut Command| {
            let printed = command.args(["SigBlk", "/proc/self/status"]).output().expect("it runs").stdout;
            String::from_utf8_lossy(&printed).trim().to_owned()
        };
        let _signals = Signals::block().expect("blocked");
        assert_ne!(blocked(&mut Command::new("grep")), "SigBlk:\t0000000000000000", "they are inherited");
        assert_eq!(blocked(with_nothing_blocked(&mut Command::new("grep"))), "SigBlk:\t0000000000000000");
    }
}
