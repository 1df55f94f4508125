//! How long a caller of `/route` wants to wait: `?wait=N`, or `Prefer` (RFC 7240).
//!
//! A query that is wrong is an error. A preference that is wrong, or not ours, is none: that is what the RFC wants.

use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use serde::Deserialize;
use utoipa::IntoParams;

const PREFER: HeaderName = HeaderName::from_static("prefer");
pub(super) const APPLIED: HeaderName = HeaderName::from_static("preference-applied");

#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Waiting {
    /// Seconds to wait for a daemon that is not warm, and then to answer 202. Without it: as long as a route may wait,
    /// and then an error.
    wait: Option<u64>,
}

/// What was asked for, and what is to be said of it.
#[derive(Debug, PartialEq, Eq, Default)]
pub(super) struct Wait {
    pub(super) span: Option<Duration>,
    /// The value of `Preference-Applied`.
    pub(super) applied: Option<HeaderValue>,
}

/// The query wins. `Err` says what is wrong with it. `longest`: what a route may wait.
pub(super) fn read(query: &Waiting, headers: &HeaderMap, longest: Duration) -> Result<Wait, String> {
    if let Some(seconds) = query.wait {
        if seconds > longest.as_secs() {
            return Err(format!("wait is {seconds}: it is a number of seconds from 0 to {}", longest.as_secs()));
        }
        return Ok(Wait { span: Some(Duration::from_secs(seconds)), applied: None });
    }
    let Preference { respond_async, wait } = preference(headers);
    // A longer patience than a route has is one up to its end.
    let wait = wait.map(|seconds| seconds.min(longest.as_secs()));
    let applied = match (respond_async, wait) {
        (false, None) => return Ok(Wait::default()),
        (true, None) => "respond-async".to_owned(),
        (false, Some(seconds)) => format!("wait={seconds}"),
        (true, Some(seconds)) => format!("respond-async, wait={seconds}"),
    };
    // Letters and digits are always a header's value.
    let applied = HeaderValue::try_from(applied).ok();
    Ok(Wait { span: Some(Duration::from_secs(wait.unwrap_or(0))), applied })
}

#[derive(Debug, Default)]
struct Preference {
    respond_async: bool,
    wait: Option<u64>,
}

/// Of several of one name the first counts, and names know no case.
fn preference(headers: &HeaderMap) -> Preference {
    let mut found = Preference::default();
    let values = headers.get_all(PREFER).iter().filter_map(|value| value.to_str().ok());
    for preference in values.flat_map(|value| value.split(',')) {
        // Parameters of a preference come after a semicolon; ours have none.
        let preference = preference.split(';').next().unwrap_or_default();
        let (name, value) = match preference.split_once('=') {
            Some((name, value)) => (name.trim(), Some(value.trim().trim_matches('"'))),
            None => (preference.trim(), None),
        };
        if name.eq_ignore_ascii_case("respond-async") {
            found.respond_async = true;
        } else if name.eq_ignore_ascii_case("wait") && found.wait.is_none() {
            let digits = value.filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
            found.wait = digits.and_then(|text| text.parse().ok());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONGEST: Duration = Duration::from_secs(180);

    fn prefer(values: &[&str]) -> (Option<u64>, Option<String>) {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(PREFER, value.parse().expect("a value"));
        }
        let wait = read(&Waiting::default(), &headers, LONGEST).expect("no query, no error");
        let applied = wait.applied.map(|value| value.to_str().expect("text").to_owned());
        (wait.span.map(|span| span.as_secs()), applied)
    }

    #[test]
    fn preferences() {
        for (values, seconds, applied) in [
            (&[][..], None, None),
            (&["respond-async"], Some(0), Some("respond-async")),
            (&["Respond-Async; x=y"], Some(0), Some("respond-async")),
            (&["wait=10"], Some(10), Some("wait=10")),
            (&["wait = \"10\""], Some(10), Some("wait=10")),
            (&["respond-async, wait=10"], Some(10), Some("respond-async, wait=10")),
            (&["wait=10", "respond-async"], Some(10), Some("respond-async, wait=10")),
            (&["wait=7, wait=9"], Some(7), Some("wait=7")),
            (&["wait=100000"], Some(180), Some("wait=180")),
            (&["wait=0"], Some(0), Some("wait=0")),
            (&["wait", "handling=lenient", "return=minimal"], None, None),
            (&["wait=-1"], None, None),
            (&["wait=+1"], None, None),
            (&["wait=soon"], None, None),
            (&["wait=99999999999999999999999"], None, None),
            (&[",,;=,"], None, None),
        ] {
            assert_eq!(prefer(values), (seconds, applied.map(str::to_owned)), "{values:?}");
        }
    }

    #[test]
    fn the_query_wins_and_is_checked() {
        let mut headers = HeaderMap::new();
        headers.append(PREFER, "wait=7".parse().expect("a value"));
        let read = |wait| read(&Waiting { wait: Some(wait) }, &headers, LONGEST);
        assert_eq!(read(180), Ok(Wait { span: Some(LONGEST), applied: None }));
        assert_eq!(read(0), Ok(Wait { span: Some(Duration::ZERO), applied: None }));
        assert!(read(181).is_err_and(|why| why.contains("0 to 180")));
    }
}
