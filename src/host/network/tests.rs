//! The rules are checked as text, and loaded into a real kernel where the tests run as root.

use std::process::Command as StdCommand;

use super::*;

fn config(table: &str) -> NetworkConfig {
    let resolvers = vec!["9.9.9.9".parse().expect("an address"), "2620:fe::fe".parse().expect("an address")];
    let mut config = NetworkConfig::new("10.78.0.0/16".parse().expect("a range"), resolvers);
    table.clone_into(&mut config.table);
    config
}

#[test]
fn the_order_of_an_instance_s_way_out() {
    let text = rules::render(&config("kiln"), &["kiln0a4e0001".to_owned()]);
    let chain =
        text.split("chain from_instance {").nth(1).and_then(|rest| rest.split("\n  }").next()).expect("the chain");
    let at = |needle: &str| chain.find(needle).unwrap_or_else(|| panic!("{needle} is missing in {chain}"));
    assert!(at("ct state established") < at("oifname"));
    assert!(at("oifname") < at("@resolvers4"), "a resolver among the instances would be let through");
    assert!(at("@resolvers4") < at("@closed4"), "a resolver with a private address would be closed");
    assert!(at("@closed4") < at("@public") && at("@closed6") < at("@public"));
    assert!(text.contains("elements = { \"kiln0a4e0001\" }"));
    assert!(text.starts_with("table inet kiln\ndelete table inet kiln\n"), "it is not replaced as a whole");
}

#[test]
fn an_empty_set_has_no_elements_line() {
    let mut config = config("kiln");
    config.resolvers.clear();
    assert!(!rules::render(&config, &[]).contains("elements = {  }"));
}

#[test]
fn what_cannot_be_read_admits_nobody() {
    for listing in
        ["", "[]", "{\"nftables\": 1}", r#"{"nftables":[{"set":{"name":"public","elem":["eth0", "kiln\" }", 7]}}]}"#]
    {
        assert!(rules::admitted(listing).is_empty(), "of {listing}");
    }
    assert_eq!(
        rules::admitted(r#"{"nftables":[{"set":{"name":"public","elem":["kiln0a4e0001"]}}]}"#),
        ["kiln0a4e0001"]
    );
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
    network.admit(address, Reach::Public).await.expect("admitted");
    network.admit(address, Reach::Public).await.expect("admitted twice");
    network.ensure().await.expect("replaced");
    let listing = network.list().await.expect("a listing");
    assert_eq!(rules::admitted(&listing), ["kiln0a4e0001"], "replacing forgot who was admitted");
    network.admit(address, Reach::Confined).await.expect("confined");
    network.admit(address, Reach::Confined).await.expect("confined twice");
    assert!(rules::admitted(&network.list().await.expect("a listing")).is_empty());
    let outside = network.admit(Ipv4Addr::new(10, 99, 0, 1), Reach::Public).await;
    assert!(matches!(outside, Err(NetworkError::Foreign { .. })));

    for damage in [
        "flush chain inet kiln-unit-test from_instance",
        "delete element inet kiln-unit-test closed4 { 169.254.0.0/16 }",
        "flush table inet kiln-unit-test",
        "delete table inet kiln-unit-test",
    ] {
        network.nft("damage the table", &["-f", "-"], damage).await.expect("damaged");
        assert!(network.check().await.is_err(), "not noticed: {damage}");
        network.admit(address, Reach::Confined).await.expect("put back");
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
