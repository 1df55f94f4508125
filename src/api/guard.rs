//! Who may speak over TCP: programs on this host, and not the web pages that a browser on it has open.
//!
//! Loopback keeps other hosts out, but any page can make a browser send requests to it. Such a request either carries
//! `Origin` (all cross-site POSTs do), or came through a name that was made to point here (DNS rebinding), which then
//! stands in `Host`. Programs send no `Origin`, and `Host` is the loopback address that they were given.

use std::net::IpAddr;

use axum::extract::Request;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::Response;

use super::answers::in_the_style_of;

pub(super) async fn loopback_only(request: Request, next: Next) -> Response {
    match objection(request.uri(), request.headers()) {
        Some(words) => in_the_style_of(request.uri(), StatusCode::FORBIDDEN, words),
        None => next.run(request).await,
    }
}

fn objection(uri: &Uri, headers: &HeaderMap) -> Option<&'static str> {
    if headers.contains_key(header::ORIGIN) {
        return Some("requests of web pages are refused: this one carries Origin");
    }
    let mut hosts = headers.get_all(header::HOST).iter();
    let host = hosts.next().and_then(|value| value.to_str().ok()).and_then(|text| text.parse::<Authority>().ok());
    let is_local = host.is_some_and(|host| is_loopback(&host))
        && hosts.next().is_none()
        && uri.authority().is_none_or(is_loopback);
    (!is_local)
        .then_some("only requests to this host's loopback address are accepted: use 127.0.0.1 or the unix socket")
}

fn is_loopback(authority: &Authority) -> bool {
    let host = authority.host();
    let address = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    // `user@host` is no host that a program sends.
    !authority.as_str().contains('@')
        && (host.eq_ignore_ascii_case("localhost") || address.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accepts(uri: &str, host: Option<&str>) -> bool {
        let mut headers = HeaderMap::new();
        if let Some(host) = host {
            headers.insert(header::HOST, host.parse().expect("a header"));
        }
        objection(&uri.parse().expect("a URI"), &headers).is_none()
    }

    #[test]
    fn only_loopback_is_a_host() {
        for host in ["127.0.0.1", "127.0.0.1:8080", "127.8.9.1", "localhost", "LocalHost:80", "[::1]", "[::1]:8080"] {
            assert!(accepts("/route", Some(host)), "{host}");
        }
        for host in [
            "evil.example",
            "10.0.0.1",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "localhost@evil.example",
            "evil@localhost",
            "[::2]",
            "0.0.0.0",
            "2130706433",
            "",
            "127.0.0.1, evil.example",
            "[::ffff:10.0.0.1]",
        ] {
            assert!(!accepts("/route", Some(host)), "{host}");
        }
        assert!(!accepts("/route", None));
        assert!(!accepts("http://evil.example/route", Some("127.0.0.1")));
        assert!(accepts("http://127.0.0.1/route", Some("127.0.0.1")));
    }

    #[test]
    fn one_host_and_no_origin() {
        let mut headers = HeaderMap::new();
        headers.append(header::HOST, "127.0.0.1".parse().expect("a header"));
        headers.append(header::HOST, "evil.example".parse().expect("a header"));
        assert!(objection(&Uri::from_static("/route"), &headers).is_some());
        for origin in ["null", "http://127.0.0.1", "https://evil.example"] {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, "127.0.0.1".parse().expect("a header"));
            headers.insert(header::ORIGIN, origin.parse().expect("a header"));
            assert!(objection(&Uri::from_static("/route"), &headers).is_some(), "{origin}");
        }
    }
}
