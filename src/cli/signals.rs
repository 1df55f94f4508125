//! The signals that ask us to end.

use std::fs;
use std::io;

use rustix::process::{Pid, Signal, getpgrp, kill_process};
use rustix::termios::tcgetpgrp;
use tokio::signal::unix::{Signal as Stream, SignalKind, signal};

use super::CliError;

/// One of the three that end a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ending(Signal);

impl Ending {
    pub(super) fn exit_code(self) -> u8 {
        128_u8.saturating_add(u8::try_from(self.0.as_raw()).unwrap_or(0))
    }

    /// Hands it to a child in our process group, unless the terminal has done so already: at the keyboard, Ctrl-C
    /// reaches the whole foreground group, and a second one would mean more to buildx.
    pub(super) fn pass_on(self, child: u32) {
        if self.0 == Signal::INT && is_foreground() {
            return;
        }
        if let Some(pid) = i32::try_from(child).ok().and_then(Pid::from_raw) {
            // It may have ended by itself meanwhile, which is what was wanted.
            let _ = kill_process(pid, self.0);
        }
    }
}

/// Hears SIGINT, SIGTERM and SIGHUP from its making on.
#[derive(Debug)]
pub(super) struct Signals {
    interrupt: Option<Stream>,
    terminate: Option<Stream>,
    hangup: Option<Stream>,
}

impl Signals {
    /// Signals that our parent had us ignore (`nohup`, a shell's background jobs) stay ignored.
    pub(super) fn listen() -> Result<Self, CliError> {
        let ignored = ignored();
        let stream = |kind: SignalKind| -> io::Result<Option<Stream>> {
            let bit = 1_u64 << (kind.as_raw_value() - 1);
            if ignored & bit == 0 { signal(kind).map(Some) } else { Ok(None) }
        };
        let all = || -> io::Result<Self> {
            Ok(Self {
                interrupt: stream(SignalKind::interrupt())?,
                terminate: stream(SignalKind::terminate())?,
                hangup: stream(SignalKind::hangup())?,
            })
        };
        all().map_err(CliError::Signals)
    }

    pub(super) async fn next(&mut self) -> Ending {
        tokio::select! {
            () = heard(&mut self.interrupt) => Ending(Signal::INT),
            () = heard(&mut self.terminate) => Ending(Signal::TERM),
            () = heard(&mut self.hangup) => Ending(Signal::HUP),
        }
    }
}

async fn heard(stream: &mut Option<Stream>) {
    let came = match stream {
        Some(stream) => stream.recv().await,
        None => None,
    };
    if came.is_none() {
        std::future::pending::<()>().await;
    }
}

/// The mask of ignored signals; none where the kernel does not say.
fn ignored() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

fn is_foreground() -> bool {
    fs::File::open("/dev/tty").is_ok_and(|tty| tcgetpgrp(&tty).is_ok_and(|group| group == getpgrp()))
}
