//! Whose each address is, by what the host tells when the database is lost. Pure.
//!
//! The mark on a volume is as old as the last start: a copy that was never started, or a cache that came back from the trash,
//! tells of an address that has been another's since. Whoever runs has the address that it runs at, whatever else is marked
//! with it; one address given wrongly would be taken from its owner, who takes another's, and so on.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use kiln_domain::{AddressPool, Key, Role};

use crate::host::volumes::FoundVolume;
use crate::host::{FoundInstance, Properties};

const ADDRESS: &str = "address";

/// What of a project is on the host, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Hold {
    Runs,
    Made,
    Cache,
    Copy,
}

/// A project, or what is derived from one, of which the host tells.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) key: Key,
    /// The marks of its objects, to be tried in this order, each with the address that is its own; without one it is to get
    /// one that is free.
    pub(super) told: Vec<Properties>,
}

struct Found<'a> {
    hold: Hold,
    address: Option<Ipv4Addr>,
    told: Vec<&'a Properties>,
}

/// In the order in which they are to be put back: who gets a new address comes after all that have one. Where `instances` were
/// not seen, whatever does not surely have an address is left out.
pub(super) fn claims(volumes: &[FoundVolume], instances: Option<&[FoundInstance]>, pool: AddressPool) -> Vec<Claim> {
    let mut all: Vec<(&Key, Found<'_>)> = find(volumes, instances.unwrap_or_default(), pool).into_iter().collect();
    // Among equals in the order of their keys.
    all.sort_by_key(|(_, found)| found.hold);
    let mut owners: BTreeMap<Ipv4Addr, &Key> = BTreeMap::new();
    let mut disputed = BTreeSet::new();
    for (key, Found { address, .. }) in &all {
        if let Some(address) = address
            && owners.insert(*address, owners.get(address).copied().unwrap_or(key)).is_some()
        {
            disputed.insert(*address);
        }
    }
    let own = |key: &Key, address: &Ipv4Addr| owners.get(address).is_some_and(|owner| *owner == key);
    let (with, without): (Vec<_>, Vec<_>) = all
        .into_iter()
        .map(|(key, found)| {
            let address = found.address.filter(|address| own(key, address));
            (address, Claim { key: key.clone(), told: found.told.into_iter().map(|p| at(p, address)).collect() })
        })
        .partition(|(address, _)| address.is_some());
    let sure = |address: &Option<Ipv4Addr>| address.is_some_and(|address| !disputed.contains(&address));
    let all = with.into_iter().chain(without).filter(|(address, _)| instances.is_some() || sure(address));
    all.map(|(_, claim)| claim).collect()
}

/// Volumes first: they carry the settings. The address is the instance's.
fn find<'a>(
    volumes: &'a [FoundVolume],
    instances: &'a [FoundInstance],
    pool: AddressPool,
) -> BTreeMap<&'a Key, Found<'a>> {
    let is_one = |key: &&Key| key.role() != Role::Trial;
    let address = |properties: &Properties| {
        properties.get(ADDRESS)?.parse().ok().filter(|address: &Ipv4Addr| pool.contains(*address))
    };
    let mut all: BTreeMap<&Key, Found<'_>> = BTreeMap::new();
    for FoundVolume { key, properties, .. } in volumes {
        let Some(key) = key.as_ref().filter(is_one) else { continue };
        let hold = if key.role().is_derived() { Hold::Copy } else { Hold::Cache };
        all.insert(key, Found { hold, address: address(properties), told: vec![properties] });
    }
    for FoundInstance { key, properties, running, .. } in instances {
        let Some(key) = key.as_ref().filter(is_one) else { continue };
        let found = all.entry(key).or_insert(Found { hold: Hold::Made, address: None, told: Vec::new() });
        found.hold = if *running { Hold::Runs } else { Hold::Made };
        found.address = address(properties).or(found.address);
        found.told.push(properties);
    }
    all
}

/// The same marks, with this address or none.
fn at(properties: &Properties, address: Option<Ipv4Addr>) -> Properties {
    let mut properties = properties.clone();
    match address {
        Some(address) => properties.insert(ADDRESS.to_owned(), address.to_string()),
        None => properties.remove(ADDRESS),
    };
    properties
}

#[cfg(test)]
mod tests {
    use kiln_domain::BuildSpec;

    use super::*;

    const POOL: AddressPool = AddressPool { first: Ipv4Addr::new(10, 88, 0, 1), last: Ipv4Addr::new(10, 88, 0, 250) };

    fn key(number: u8) -> Key {
        Key::of(&BuildSpec::new(&format!("github.com/org/repo{number}"), "", "", "amd64").expect("valid"))
    }

    fn marks(last: u8) -> Properties {
        Properties::from([(ADDRESS.to_owned(), Ipv4Addr::new(10, 88, 0, last).to_string())])
    }

    fn volume(key: &Key, last: u8) -> FoundVolume {
        FoundVolume { name: key.to_string(), key: Some(key.clone()), properties: marks(last) }
    }

    fn instance(key: &Key, last: u8, running: bool) -> FoundInstance {
        FoundInstance { name: key.to_string(), key: Some(key.clone()), properties: marks(last), running }
    }

    /// Who is put back, and with the last number of which address.
    fn given(volumes: &[FoundVolume], instances: Option<&[FoundInstance]>) -> Vec<(Key, Option<u8>)> {
        let address = |claim: &Claim| {
            let told: Vec<_> = claim.told.iter().map(|marks| marks.get(ADDRESS).cloned()).collect();
            assert!(told.windows(2).all(|pair| pair[0] == pair[1]), "one address for all of its marks: {told:?}");
            told[0].as_ref().map(|text| text.parse::<Ipv4Addr>().expect("an address").octets()[3])
        };
        claims(volumes, instances, POOL).into_iter().map(|claim| (claim.key.clone(), address(&claim))).collect()
    }

    #[test]
    fn who_runs_at_an_address_has_it_and_nobody_else_s_is_given_away() {
        let (one, two) = (key(1), key(2));
        let member = one.clone_number(1);
        // The copy was never started, and its address is that of the daemon which came after it.
        let volumes = [volume(&member, 5), volume(&one, 1), volume(&two, 5)];
        let instances = [instance(&one, 1, false), instance(&two, 5, true)];
        let all = given(&volumes, Some(&instances));
        assert_eq!(all, [(two.clone(), Some(5)), (one.clone(), Some(1)), (member, None)]);
        // Of a cache that came back from the trash.
        let volumes = [volume(&one, 5), volume(&two, 7)];
        let instances = [instance(&two, 5, true)];
        assert_eq!(given(&volumes, Some(&instances)), [(two, Some(5)), (one, None)], "the mark on its volume is older");
    }

    #[test]
    fn a_project_comes_before_its_copies_and_one_that_is_made_before_one_that_is_not() {
        let (one, two) = (key(1), key(2));
        let fork = one.fork();
        let volumes = [volume(&fork, 3), volume(&one, 3), volume(&two, 3)];
        let first = given(&volumes, Some(&[])).remove(0);
        assert!([one.clone(), two.clone()].contains(&first.0) && first.1 == Some(3), "{first:?}");
        let made = given(&volumes, Some(&[instance(&fork, 3, false)]));
        assert_eq!(made[0], (fork, Some(3)));
        assert!(made[1..].iter().all(|(_, address)| address.is_none()), "{made:?}");
    }

    #[test]
    fn before_the_instances_are_seen_only_what_is_sure_is_put_back() {
        let (one, two, three, four) = (key(1), key(2), key(3), key(4));
        let outside = FoundVolume { properties: Properties::new(), ..volume(&four, 1) };
        let volumes = [volume(&one, 3), volume(&two, 3), volume(&three, 4), outside];
        assert_eq!(given(&volumes, None), [(three, Some(4))]);
        assert_eq!(given(&volumes, Some(&[])).len(), 4);
    }

    #[test]
    fn trials_and_strangers_claim_nothing() {
        let stranger = FoundVolume { key: None, ..volume(&key(1), 1) };
        assert!(given(&[stranger, volume(&key(2).trial(), 1)], Some(&[])).is_empty());
    }
}
