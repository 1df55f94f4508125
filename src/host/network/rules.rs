//! The table as text, and whether a listing of it is what was rendered. Pure.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::IpAddr;

use serde_json::Value;

use super::{NetworkConfig, Reach};

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

/// Not for instances, IPv6: unspecified, loopback and IPv4-compatible, IPv4-mapped, NAT64 (it would reach the ranges
/// above), discard, protocol assignments, documentation, 6to4, segment routing, unique local, link and site local, multicast.
pub const CLOSED_V6: [&str; 14] = [
    "::/96",
    "::ffff:0:0/96",
    "64:ff9b::/96",
    "64:ff9b:1::/48",
    "100::/64",
    "2001::/23",
    "2001:db8::/32",
    "2002::/16",
    "3fff::/20",
    "5f00::/16",
    "fc00::/7",
    "fe80::/10",
    "fec0::/10",
    "ff00::/8",
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

/// One transaction that makes the table exactly this, whatever was there. `admitted` are interface names.
pub fn render(config: &NetworkConfig, admitted: &[String]) -> String {
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

/// Puts one interface into the set `public` or out of it; either is idempotent.
pub fn admission(table: &str, interface: &str, reach: Reach) -> String {
    let add = format!("add element inet {table} public {{ \"{interface}\" }}\n");
    match reach {
        Reach::Public => add,
        // Deleting what is not there would fail the transaction.
        Reach::Confined => format!("{add}delete element inet {table} public {{ \"{interface}\" }}\n"),
    }
}

fn sets(config: &NetworkConfig, admitted: &[String]) -> Vec<Set> {
    let resolvers = |v4: bool| {
        config.resolvers.iter().filter(|address| address.is_ipv4() == v4).map(IpAddr::to_string).collect::<Vec<_>>()
    };
    let closed = |ranges: &[&str]| ranges.iter().map(|&range| range.to_owned()).collect::<Vec<_>>();
    vec![
        Set { name: "closed4", kind: "ipv4_addr", intervals: true, elements: closed(&CLOSED_V4) },
        Set { name: "closed6", kind: "ipv6_addr", intervals: true, elements: closed(&CLOSED_V6) },
        Set { name: "resolvers4", kind: "ipv4_addr", intervals: false, elements: resolvers(true) },
        Set { name: "resolvers6", kind: "ipv6_addr", intervals: false, elements: resolvers(false) },
        Set {
            name: "public",
            kind: "ifname",
            intervals: false,
            elements: admitted.iter().map(|name| format!("\"{name}\"")).collect(),
        },
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
    vec![
        plain("refuse", &["meta l4proto tcp reject with tcp reset", "reject with icmpx type admin-prohibited"]),
        plain("to_host", &[replies, resolvers[0], resolvers[1], "goto refuse"]),
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
                "ip daddr @closed4 goto refuse",
                "ip6 daddr @closed6 goto refuse",
                "iifname @public accept",
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
    if rules.len() != expected.len() {
        return Err("there are rules in chains of other names".to_owned());
    }
    for set in sets(config, &[]) {
        let found = items
            .iter()
            .filter_map(|item| item.get("set"))
            .find(|found| text(found, "name") == set.name)
            .ok_or_else(|| format!("set {} is missing", set.name))?;
        let count = found.get("elem").and_then(Value::as_array).map_or(0, Vec::len);
        if set.name != "public" && count != set.elements.len() {
            return Err(format!("set {} has {count} elements in place of {}", set.name, set.elements.len()));
        }
    }
    Ok(())
}

/// The interfaces in the set `public` of a listing; none when it cannot be read: confined is the safe side.
pub fn admitted(listing: &str) -> Vec<String> {
    let Ok(items) = items(listing) else { return Vec::new() };
    let public = items.iter().filter_map(|item| item.get("set")).find(|set| text(set, "name") == "public");
    let elements = public.and_then(|set| set.get("elem")).and_then(Value::as_array);
    let names = elements.into_iter().flatten().filter_map(Value::as_str);
    let is_ours = |name: &&str| name.starts_with("kiln") && name.bytes().all(|b| b.is_ascii_alphanumeric());
    names.filter(is_ours).map(str::to_owned).collect()
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
