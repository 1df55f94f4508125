//! The rules are checked as text, and loaded into a real kernel where the tests run as root.

use std::process::Command as StdCommand;

use super::*;

fn config(table: &str) -> NetworkConfig {
    let resolvers = vec!["9.9.9.9".parse().expect("an address"), "2620:fe::fe".parse().expect("an address")];
    let mut config = NetworkConfig::new("10.78.0.0/16".parse().expect("a range"), resolvers);
    table.clone_into(&mut config.table);
    config.mirrors = vec!["10.1.2.3:5000".parse().expect("an address")];
    config.allow = vec!["10.9.0.0/16:443".parse().expect("a destination")];
    config
}

fn admitted(lane: Lane) -> rules::Admitted {
    rules::Admitted::from([("kiln0a4e0001".to_owned(), lane)])
}

/// What stands between the braces of a chain or set.
fn block<'a>(text: &'a str, name: &str) -> &'a str {
    let rest = text.split(&format!("{name} {{")).nth(1).unwrap_or_else(|| panic!("no {name} in {text}"));
    rest.split("\n  }").next().expect("its end")
}

#[test]
fn the_order_of_an_instance_s_way_out() {
    let text = rules::render(&config("kiln"), &admitted(Lane::Trusted));
    let chain = block(&text, "chain from_instance");
    let at = |needle: &str| chain.find(needle).unwrap_or_else(|| panic!("{needle} is missing in {chain}"));
    assert!(at("ct state established") < at("oifname"));
    assert!(at("oifname") < at("@resolvers4"), "a resolver among the instances would be let through");
    assert!(at("@resolvers4") < at("@closed4"), "a resolver with a private address would be closed");
    for lane in ["trusted", "untrusted"] {
        let (mirrors, public) =
            (format!("iifname @{lane} jump mirrors"), format!("nfproto ipv4 iifname @{lane} accept"));
        assert!(at(&mirrors) < at("@closed4"), "a mirror with a private address would be closed");
        assert!(at("@closed4") < at(&public));
    }
    assert!(at("@trusted jump allowed") < at("@closed4"));
    assert!(text.starts_with("table inet kiln\ndelete table inet kiln\n"), "it is not replaced as a whole");
}

#[test]
fn what_is_allowed_to_the_trusted_is_closed_to_the_others() {
    let text = rules::render(&config("kiln"), &admitted(Lane::Untrusted));
    assert!(block(&text, "set untrusted").contains("elements = { \"kiln0a4e0001\" }"), "{text}");
    assert!(!block(&text, "set trusted").contains("elements"), "{text}");
    assert_eq!(text.matches("jump allowed").count(), 1);
    assert!(block(&text, "chain mirrors").contains("ip daddr 10.1.2.3 tcp dport 5000 accept"));
    assert!(block(&text, "chain allowed").contains("ip daddr 10.9.0.0/16 tcp dport 443 accept"));
    // This host is no destination of builds, but for its resolvers and mirrors.
    assert!(!block(&text, "chain to_host").contains("allowed"));
}

#[test]
fn one_interface_is_in_one_lane() {
    let change = |lane| rules::admission("kiln", "kiln0a4e0001", lane);
    for (lane, other) in [(Lane::Trusted, "untrusted"), (Lane::Untrusted, "trusted")] {
        let text = change(Some(lane));
        assert!(text.contains(&format!("add element inet kiln {lane} ")), "{text}");
        assert!(text.contains(&format!("delete element inet kiln {other} ")), "{text}");
        assert!(!text.contains(&format!("delete element inet kiln {lane} ")), "{text}");
    }
    assert_eq!(change(None).matches("delete").count(), 2);
}

#[test]
fn an_empty_set_has_no_elements_line() {
    let mut config = config("kiln");
    config.resolvers.clear();
    assert!(!rules::render(&config, &rules::Admitted::new()).contains("elements = {  }"));
}

#[test]
fn what_cannot_be_read_admits_nobody() {
    for listing in
        ["", "[]", "{\"nftables\": 1}", r#"{"nftables":[{"set":{"name":"trusted","elem":["eth0", "kiln\" }", 7]}}]}"#]
    {
        assert!(rules::admitted(listing).is_empty(), "of {listing}");
    }
    let trusted = r#"{"set":{"name":"trusted","elem":["kiln0a4e0001"]}}"#;
    let untrusted = r#"{"set":{"name":"untrusted","elem":["kiln0a4e0001"]}}"#;
    assert_eq!(rules::admitted(&format!(r#"{{"nftables":[{trusted}]}}"#)), admitted(Lane::Trusted));
    let both = rules::admitted(&format!(r#"{{"nftables":[{untrusted},{trusted}]}}"#));
    assert_eq!(both, admitted(Lane::Untrusted), "what is in both lanes is untrusted");
    assert!(rules::verify("{\"nftables\":[]}", &config("kiln")).is_err());
}

/// Says loudly when there is nothing to test on.
fn can_load() -> bool {
    let loads = rustix::process::geteuid().is_root()
        && StdCommand::new("/usr/sbin/nft").args(["list", "tables"]).output().is_ok_and(|out| out.status.success());
    if !loads {
        eprintln!("skipped: the kernel's firewall cannot be used here (needs root and nftables)");
    }
    loads
}

#[tokio::test]
async fn a_kernel_takes_it_and_damage_is_seen() {
    if !can_load() {
        return;
    }
    let network = Network::new(config("kiln-unit-test"));
    network.ensure().await.expect("loads");
    network.ensure().await.expect("loads again");
    let address = Ipv4Addr::new(10, 78, 0, 1);
    let seen = async || rules::admitted(&network.list().await.expect("a listing"));
    for lane in [Lane::Trusted, Lane::Untrusted, Lane::Trusted] {
        network.admit(address, lane).await.expect("admitted");
        network.admit(address, lane).await.expect("admitted twice");
        assert_eq!(seen().await, admitted(lane));
        network.ensure().await.expect("replaced");
        assert_eq!(seen().await, admitted(lane), "replacing forgot who was admitted");
    }
    network.dismiss(address).await.expect("dismissed");
    network.dismiss(address).await.expect("dismissed twice");
    assert!(seen().await.is_empty());
    let outside = network.admit(Ipv4Addr::new(10, 99, 0, 1), Lane::Trusted).await;
    assert!(matches!(outside, Err(NetworkError::Foreign { .. })));

    for damage in [
        "flush chain inet kiln-unit-test from_instance",
        "delete element inet kiln-unit-test closed4 { 169.254.0.0/16 }",
        "flush chain inet kiln-unit-test mirrors",
        "add rule inet kiln-unit-test allowed accept",
        "add chain inet kiln-unit-test more; add rule inet kiln-unit-test more accept",
        "flush table inet kiln-unit-test",
        "delete table inet kiln-unit-test",
    ] {
        network.nft("damage the table", &["-f", "-"], damage).await.expect("damaged");
        assert!(network.check().await.is_err(), "not noticed: {damage}");
        network.admit(address, Lane::Untrusted).await.expect("put back");
        network.check().await.expect("whole again");
    }
    network.remove().await.expect("removed");
    network.remove().await.expect("removed twice");
    assert!(network.check().await.is_err());
}

#[tokio::test]
async fn a_missing_program_is_named() {
    let mut config = config("kiln-unit-test-2");
    config.nft = PathBuf::from("/nonexistent/nft");
    let error = Network::new(config).ensure().await.expect_err("there is none");
    assert!(error.to_string().contains("/nonexistent/nft"), "{error}");
}
