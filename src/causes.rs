//! An error and its causes, for the edge where they are shown.

use std::error::Error;

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

#[cfg(test)]
mod tests {
    use super::in_one_line;
    use crate::host::RuntimeError;

    #[test]
    fn causes_follow_their_effect_once() {
        let source = std::io::Error::other("the disk is on fire");
        let path = "/x".to_owned();
        let error = RuntimeError::Io { operation: "write", instance: "i".into(), path, source };
        assert_eq!(in_one_line(&error), "cannot write i: /x: the disk is on fire");
    }
}
