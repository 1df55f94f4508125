//! The table as text, and whether a listing of it is what was rendered. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::IpAddr;

use serde_json::Value;

use super::NetworkConfig;
use crate::host::Lane;

/// Not for instances, IPv4: the special-purpose ranges of RFC 6890 and its registry, multicast, the reserved class, and
/// the one metadata service that hides behind a public address (Azure's 168.63.129.16).
pub const CLOSED_V4: [&str; 16] = [
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "168.63.129.16/32",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.0.2.0/24",
    "192.88.99.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "224.0.0.0/4",
    "240.0.0.0/4",
];

struct Chain {
    name: &'static str,
    /// Type, hook and priority of a base chain.
    base: Option<(&'static str, &'static str, &'static str)>,
    rules: Vec<String>,
}

struct Set {
    name: &'static str,
    kind: &'static str,
    intervals: bool,
    elements: Vec<String>,
}

/// Interfaces by name, each with its lane.
pub type Admitted = BTreeMap<String, Lane>;

const LANES: [Lane; 2] = [Lane::Trusted, Lane::Untrusted];

/// One transaction that makes the table exactly this, whatever was there.
pub fn render(config: &NetworkConfig, admitted: &Admitted) -> String {
    let table = &config.table;
    let mut text = format!("table inet {table}\ndelete table inet {table}\ntable inet {table} {{\n");
    for set in sets(config, admitted) {
        let _ = writeln!(text, "  set {} {{\n    type {}", set.name, set.kind);
        if set.intervals {
            text.push_str("    flags interval\n");
        }
        if !set.elements.is_empty() {
            let _ = writeln!(text, "    elements = {{ {} }}", set.elements.join(", "));
        }
        text.push_str("  }\n");
    }
    for chain in chains(config) {
        let _ = writeln!(text, "  chain {} {{", chain.name);
        if let Some((kind, hook, priority)) = chain.base {
            let _ = writeln!(text, "    type {kind} hook {hook} priority {priority}; policy accept;");
        }
        for rule in chain.rules {
            let _ = writeln!(text, "    {rule}");
        }
        text.push_str("  }\n");
    }
    text.push_str("}\n");
    text
}

/// Puts one interface into the set of its lane and out of the other's, or out of both; idempotent.
pub fn admission(table: &str, interface: &str, lane: Option<Lane>) -> String {
    let mut text = String::new();
    for set in LANES {
        let element = |verb| format!("{verb} element inet {table} {} {{ \"{interface}\" }}\n", set.name());
        // Deleting what is not there would fail the transaction.
        text += &element("add");
        if lane != Some(set) {
            text += &element("delete");
        }
    }
    text
}

fn sets(config: &NetworkConfig, admitted: &Admitted) -> Vec<Set> {
    let resolvers = |v4: bool| {
        config.resolvers.iter().filter(|address| address.is_ipv4() == v4).map(IpAddr::to_string).collect::<Vec<_>>()
    };
    let members = |lane: Lane| Set {
        name: lane.name(),
        kind: "ifname",
        intervals: false,
        elements: admitted.iter().filter(|(_, of)| **of == lane).map(|(name, _)| format!("\"{name}\"")).collect(),
    };
    let closed = CLOSED_V4.map(str::to_owned).to_vec();
    vec![
        Set { name: "closed4", kind: "ipv4_addr", intervals: true, elements: closed },
        Set { name: "resolvers4", kind: "ipv4_addr", intervals: false, elements: resolvers(true) },
        Set { name: "resolvers6", kind: "ipv6_addr", intervals: false, elements: resolvers(false) },
        members(Lane::Trusted),
        members(Lane::Untrusted),
    ]
}

fn chains(config: &NetworkConfig) -> Vec<Chain> {
    let ours = config.range.interfaces();
    let lines = |rules: &[&str]| rules.iter().map(|&rule| rule.to_owned()).collect::<Vec<_>>();
    let base = |name, base, rules| Chain { name, base: Some(base), rules };
    let plain = |name, rules: &[&str]| Chain { name, base: None, rules: lines(rules) };
    let resolvers = [
        "ip daddr @resolvers4 meta l4proto { tcp, udp } th dport 53 accept",
        "ip6 daddr @resolvers6 meta l4proto { tcp, udp } th dport 53 accept",
    ];
    let replies = "ct state established,related accept";
    let mirrors: BTreeSet<_> = config.mirrors.iter().collect();
    let mirrors = mirrors.into_iter().map(|m| format!("ip daddr {} tcp dport {} accept", m.ip(), m.port())).collect();
    let allowed: BTreeSet<_> = config.allow.iter().collect();
    let allowed = allowed.into_iter().map(|destination| format!("{} accept", destination.matcher())).collect();
    vec![
        plain("refuse", &["meta l4proto tcp reject with tcp reset", "reject with icmpx type admin-prohibited"]),
        Chain { name: "mirrors", base: None, rules: mirrors },
        Chain { name: "allowed", base: None, rules: allowed },
        plain(
            "to_host",
            &[
                replies,
                resolvers[0],
                resolvers[1],
                "iifname @trusted jump mirrors",
                "iifname @untrusted jump mirrors",
                "goto refuse",
            ],
        ),
        plain("to_daemon", &[replies, "goto refuse"]),
        plain(
            "from_instance",
            &[
                replies,
                "ct state invalid drop",
                // Every Kiln's, not only this one's.
                "oifname \"kiln*\" goto refuse",
                resolvers[0],
                resolvers[1],
                "iifname @trusted jump mirrors",
                "iifname @untrusted jump mirrors",
                "iifname @trusted jump allowed",
                "ip daddr @closed4 goto refuse",
                // IPv6 is closed as a whole but for resolvers: no instance has an address there.
                "meta nfproto ipv4 iifname @trusted accept",
                "meta nfproto ipv4 iifname @untrusted accept",
                "goto refuse",
            ],
        ),
        // Before the other tables' filters, which stand at 0: they may refuse more, never less.
        base(
            "spoofed",
            ("filter", "prerouting", "raw"),
            vec![format!("iifname \"{ours}\" fib saddr . iif oif missing drop")],
        ),
        base("input", ("filter", "input", "-5"), vec![format!("iifname \"{ours}\" goto to_host")]),
        base(
            "forward",
            ("filter", "forward", "-5"),
            vec![format!("iifname \"{ours}\" goto from_instance"), format!("oifname \"{ours}\" goto to_daemon")],
        ),
        base(
            "outward",
            ("nat", "postrouting", "srcnat"),
            vec![format!("iifname \"{ours}\" oifname != \"{ours}\" masquerade")],
        ),
    ]
}

/// Whether `nft -j list table` shows every chain at its hook with all its rules, and every set with all its elements.
/// Says what is wrong.
pub fn verify(listing: &str, config: &NetworkConfig) -> Result<(), String> {
    let items = items(listing)?;
    let mut rules: BTreeMap<&str, usize> = BTreeMap::new();
    for rule in items.iter().filter_map(|item| item.get("rule")) {
        *rules.entry(text(rule, "chain")).or_default() += 1;
    }
    let expected = chains(config);
    for chain in &expected {
        let found = items
            .iter()
            .filter_map(|item| item.get("chain"))
            .find(|found| text(found, "name") == chain.name)
            .ok_or_else(|| format!("chain {} is missing", chain.name))?;
        if let Some((kind, hook, _)) = chain.base
            && (text(found, "type"), text(found, "hook"), text(found, "policy")) != (kind, hook, "accept")
        {
            return Err(format!("chain {} is not at its hook", chain.name));
        }
        let count = rules.get(chain.name).copied().unwrap_or_default();
        if count != chain.rules.len() {
            return Err(format!("chain {} has {count} rules in place of {}", chain.name, chain.rules.len()));
        }
    }
    if rules.keys().any(|name| expected.iter().all(|chain| chain.name != *name)) {
        return Err("there are rules in chains of other names".to_owned());
    }
    for set in sets(config, &Admitted::new()) {
        let found = items
            .iter()
            .filter_map(|item| item.get("set"))
            .find(|found| text(found, "name") == set.name)
            .ok_or_else(|| format!("set {} is missing", set.name))?;
        let count = found.get("elem").and_then(Value::as_array).map_or(0, Vec::len);
        if LANES.iter().all(|lane| lane.name() != set.name) && count != set.elements.len() {
            return Err(format!("set {} has {count} elements in place of {}", set.name, set.elements.len()));
        }
    }
    Ok(())
}

/// The interfaces in the lanes' sets of a listing; none when it cannot be read: closed is the safe side.
pub fn admitted(listing: &str) -> Admitted {
    let Ok(items) = items(listing) else { return Admitted::new() };
    let is_ours = |name: &&str| name.starts_with("kiln") && name.bytes().all(|b| b.is_ascii_alphanumeric());
    let mut admitted = Admitted::new();
    // Untrusted last: what is in both is that.
    for lane in LANES {
        let set = items.iter().filter_map(|item| item.get("set")).find(|set| text(set, "name") == lane.name());
        let elements = set.and_then(|set| set.get("elem")).and_then(Value::as_array);
        let names = elements.into_iter().flatten().filter_map(Value::as_str).filter(is_ours);
        admitted.extend(names.map(|name| (name.to_owned(), lane)));
    }
    admitted
}

fn items(listing: &str) -> Result<Vec<Value>, String> {
    let listing: Value = serde_json::from_str(listing).map_err(|error| format!("its listing is not JSON: {error}"))?;
    match listing.get("nftables") {
        Some(Value::Array(items)) => Ok(items.clone()),
        _ => Err("its listing holds no table".to_owned()),
    }
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value.get(field).and_then(Value::as_str).unwrap_or_default()
}
