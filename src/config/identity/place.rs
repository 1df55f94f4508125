//! Where an issuer is.

use std::net::IpAddr;

use axum::http::Uri;

/// An address of the web, as far as it says where to ask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// `false`: in the clear, to this machine itself.
    pub tls: bool,
    /// Lower case; of an IPv6 address without its brackets.
    pub host: String,
    pub port: u16,
    /// With a query, if there is one.
    pub path: String,
}

impl Place {
    /// Only TLS counts, but for this machine itself. The text says what is wrong.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        if text.bytes().any(|b| !b.is_ascii_graphic()) || text.contains(['#', '@', '\\', '"']) {
            return Err("is no plain address: give it as https://host/path, without user or #");
        }
        let uri: Uri = text.parse().map_err(|_| "is no address: give it as https://host/path")?;
        let (Some(scheme), Some(host)) = (uri.scheme_str(), uri.host().filter(|host| !host.is_empty())) else {
            return Err("is no address: give it as https://host/path");
        };
        let host = host.trim_start_matches('[').trim_end_matches(']').to_ascii_lowercase();
        let tls = match scheme {
            "https" => true,
            "http" if is_loopback(&host) => false,
            _ => return Err("is not https: only a loopback address may do without"),
        };
        let path = uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
        Ok(Self { tls, host, port: uri.port_u16().unwrap_or(if tls { 443 } else { 80 }), path })
    }

    /// `host:port`, or the host alone where the port is the usual one.
    pub fn authority(&self) -> String {
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        match (self.tls, self.port) {
            (true, 443) | (false, 80) => host,
            (_, port) => format!("{host}:{port}"),
        }
    }
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}
