//! An error and its causes, for the edge where they are shown.

use std::error::Error;
use std::io;

/// `what: why: why that`. A cause that its effect has quoted already is not said twice.
pub fn in_one_line(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}

/// Whether a file system without room, or a quota that is used up, is at the bottom of it.
pub fn is_no_room(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
        if matches!(kind, Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)) {
            return true;
        }
        next = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::{in_one_line, is_no_room};
    use crate::host::RuntimeError;

    #[test]
    fn causes_follow_their_effect_once() {
        let source = std::io::Error::other("the disk is on fire");
        let path = "/x".to_owned();
        let error = RuntimeError::Io { operation: "write", instance: "i".into(), path, source };
        assert_eq!(in_one_line(&error), "cannot write i: /x: the disk is on fire");
    }

    #[test]
    fn no_room_is_found_below_what_it_stopped() {
        let error = |source| RuntimeError::Io { operation: "write", instance: "i".into(), path: "/x".into(), source };
        for errno in [rustix::io::Errno::NOSPC, rustix::io::Errno::DQUOT] {
            assert!(is_no_room(&error(errno.into())), "{errno:?}");
        }
        assert!(!is_no_room(&error(rustix::io::Errno::IO.into())));
    }
}
