//! How projects come, change and go.

use std::collections::HashSet;

use futures_util::future::join_all;
use kiln_domain::{Generation, Identity, Phase, ProjectRecord, Settings, Tier};

use super::super::{Created, StoreError};
use super::writing::sql;
use super::*;

#[tokio::test]
async fn a_project_comes_back_as_it_was_saved() {
    let place = Place::new();
    let store = place.open();
    assert_eq!(store.project(&key(1)).await.expect("reads"), None);
    let Created { mut record, new } = store.create_project(&spec(1), POOL, NOW).await.expect("creates");
    assert!(new);
    assert_eq!((record.address, &record.phase), (POOL.first, &Phase::Absent));
    assert_eq!(store.project(&key(1)).await.expect("reads"), Some(record.clone()));

    record.phase = Phase::Failed { reason: "no room".to_owned() };
    record.generation = Generation::from_stored(7);
    record.incarnation = Some("run 7".to_owned());
    record.settings = Settings {
        tier: Some(Tier::Hot),
        idle_window: Some(Duration::from_millis(90_001)),
        volume_bytes: Some(u64::MAX),
        memory_bytes: Some(1 << 30),
        cpus: Some(3),
        processes: Some(4096),
        io_bytes: Some(9 << 20),
        entitlements: Some([kiln_domain::Entitlement::NetworkHost].into()),
        ..Settings::default()
    };
    record.builds.note(NOW);
    record.builds.note(NOW.plus(Duration::from_secs(1)));
    record.last_activity = NOW.plus(Duration::from_secs(5));
    store.save_project(&record, Some(event("saved"))).await.expect("saves");
    assert_eq!(store.project(&key(1)).await.expect("reads"), Some(record.clone()));

    let again = store.create_project(&spec(1), POOL, NOW.plus(Duration::from_secs(9))).await.expect("finds");
    assert_eq!(again, Created { record, new: false });
    let other = kiln_domain::ProjectRecord::new(spec(2), POOL.last, NOW);
    assert!(
        matches!(store.save_project(&other, None).await, Err(StoreError::UnknownProject { key: k }) if k == key(2))
    );
}

#[tokio::test]
async fn every_phase_is_kept() {
    let place = Place::new();
    let store = place.open();
    let mut record = store.create_project(&spec(1), POOL, NOW).await.expect("creates").record;
    for phase in [
        Phase::Absent,
        Phase::Provisioning,
        Phase::Starting,
        Phase::Warm,
        Phase::Draining,
        Phase::Rolling,
        Phase::Idle,
        Phase::Removing,
        Phase::Failed { reason: String::new() },
    ] {
        record.phase = phase;
        store.save_project(&record, None).await.expect("saves");
        assert_eq!(store.project(&record.key).await.expect("reads").as_ref(), Some(&record));
    }
}

#[tokio::test]
async fn one_key_with_two_identities_is_refused() {
    let place = Place::new();
    let store = place.open();
    store.create_project(&spec(1), POOL, NOW).await.expect("creates");
    // A collision of two 64-bit keys, the cheap way.
    store.submit(sql("UPDATE projects SET repo = 'github.com/victim/repo'")).await.expect("writes");
    let error = store.create_project(&spec(1), POOL, NOW).await.expect_err("is refused");
    assert!(matches!(&error, StoreError::OtherIdentity { key: k, stored }
        if *k == key(1) && stored.repo.as_str() == "github.com/victim/repo"));
    assert!(error.to_string().contains("must not share its cache"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_at_once_get_two_hundred_addresses() {
    let place = Place::new();
    let store = place.open();
    let twice = (0..400).map(|i| {
        let store = store.clone();
        tokio::spawn(async move { store.create_project(&spec(i % 200), POOL, NOW).await.expect("creates") })
    });
    let created: Vec<Created> = join_all(twice).await.into_iter().map(|c| c.expect("runs")).collect();
    assert_eq!(created.iter().filter(|c| c.new).count(), 200);
    let addresses: HashSet<_> = created.iter().map(|c| c.record.address).collect();
    assert_eq!(addresses.len(), 200);
    assert!(addresses.iter().all(|a| POOL.contains(*a) && a.to_bits() < POOL.first.to_bits() + 200), "no holes");
}

#[tokio::test]
async fn the_lowest_free_address_is_given_until_there_is_none() {
    let place = Place::new();
    let store = place.open();
    let pool = AddressPool { first: Ipv4Addr::new(10, 0, 0, 254), last: Ipv4Addr::new(10, 0, 1, 2) };
    let address = async |number| store.create_project(&spec(number), pool, NOW).await.map(|c| c.record.address);
    for number in 0..5 {
        address(number).await.expect("there is room");
    }
    assert!(matches!(address(5).await, Err(StoreError::NoAddress { pool: p }) if p == pool));
    for (freed, text) in [
        (pool.first, "DELETE FROM projects WHERE address = 0x0a0000fe"),
        (Ipv4Addr::new(10, 0, 1, 0), "DELETE FROM projects WHERE address = 0x0a000100"),
        (pool.last, "DELETE FROM projects WHERE address = 0x0a000102"),
    ] {
        store.submit(sql(text)).await.expect("deletes");
        assert_eq!(address(100 + freed.to_bits() as usize).await.expect("one is free"), freed);
    }
    let empty = AddressPool { first: pool.last, last: pool.first };
    assert!(matches!(store.create_project(&spec(77), empty, NOW).await, Err(StoreError::NoAddress { .. })));
}

fn found_on_the_host(number: usize, address: Ipv4Addr) -> ProjectRecord {
    let mut record = ProjectRecord::new(spec(number), address, NOW);
    record.phase = Phase::Idle;
    record.generation = Generation::from_stored(3);
    record.settings.cpus = Some(2);
    record
}

#[tokio::test]
async fn an_adopted_project_keeps_its_address_if_it_can() {
    let place = Place::new();
    let store = place.open();
    store.create_project(&spec(0), POOL, NOW).await.expect("creates");
    let adopt = async |number, address| {
        let record = found_on_the_host(number, address);
        store.adopt_project(record, POOL, Some(event("adopted"))).await.expect("adopts")
    };
    let lowest = |above| Ipv4Addr::from_bits(POOL.first.to_bits() + above);
    for (number, wanted, given) in [
        (1, Ipv4Addr::new(10, 83, 7, 7), Ipv4Addr::new(10, 83, 7, 7)),
        (2, POOL.first, lowest(1)),
        (3, Ipv4Addr::new(192, 168, 0, 1), lowest(2)),
    ] {
        let adopted = adopt(number, wanted).await;
        assert_eq!(adopted, Created { record: found_on_the_host(number, given), new: true });
        assert_eq!(store.project(&key(number)).await.expect("reads"), Some(adopted.record));
    }
    assert_eq!(store.latest_event_id().await.expect("reads"), 3);
}

#[tokio::test]
async fn a_project_that_is_known_is_adopted_as_it_is_or_not_at_all() {
    let place = Place::new();
    let store = place.open();
    let there = store.create_project(&spec(1), POOL, NOW).await.expect("creates").record;
    let again = store.adopt_project(found_on_the_host(1, POOL.last), POOL, Some(event("adopted"))).await;
    assert_eq!(again.expect("is known"), Created { record: there.clone(), new: false });
    assert_eq!(store.latest_event_id().await.expect("reads"), 0, "nothing happened");

    let mut misnamed = found_on_the_host(2, POOL.last);
    misnamed.key = key(1);
    let refused = store.adopt_project(misnamed, POOL, None).await;
    assert!(matches!(refused, Err(StoreError::WrongKey { stored, right }) if stored == key(1) && right == key(2)));
    let full = AddressPool { first: there.address, last: there.address };
    let refused = store.adopt_project(found_on_the_host(2, POOL.last), full, None).await;
    assert!(matches!(refused, Err(StoreError::NoAddress { .. })));
    assert_eq!(store.projects().await.expect("reads"), [there]);
}

#[tokio::test]
async fn a_row_that_cannot_be_read_is_replaced_and_keeps_its_leases() {
    let place = Place::new();
    let store = place.open();
    let there = store.create_project(&spec(1), POOL, NOW).await.expect("creates").record;
    store.create_project(&spec(2), POOL, NOW).await.expect("creates");
    store.add_lease(&key(1), &lease(1), &BuildTimes::default(), None).await.expect("adds");
    let found = || found_on_the_host(1, there.address);
    let whole = store.mend_project(found(), POOL, Some(event("mended"))).await.expect("is well");
    assert_eq!(whole, Created { record: there.clone(), new: false });
    for damage in [
        "UPDATE projects SET phase = 'dancing' WHERE repo = 'github.com/org/repo1'",
        "UPDATE projects SET settings = 'x' WHERE repo = 'github.com/org/repo1'",
        "UPDATE projects SET arch = 'vax' WHERE repo = 'github.com/org/repo1'",
        "UPDATE projects SET phase = 'dancing', address = 1 WHERE repo = 'github.com/org/repo1'",
    ] {
        store.submit(sql(damage)).await.expect("damages");
        let refused = store.adopt_project(found(), POOL, None).await;
        assert!(matches!(refused, Err(StoreError::Nonsense { .. })), "{damage}: {refused:?}");
        let mended = store.mend_project(found(), POOL, Some(event("mended"))).await.expect("mends");
        assert_eq!(mended, Created { record: found(), new: true }, "{damage}");
        assert_eq!(store.project(&key(1)).await.expect("reads"), Some(found()), "{damage}");
        assert_eq!(store.leases(&key(1)).await.expect("reads").len(), 1, "{damage}");
    }
    assert_eq!(store.projects().await.expect("reads").len(), 2);
    assert_eq!(store.latest_event_id().await.expect("reads"), 4);
}

#[tokio::test]
async fn only_what_is_being_removed_is_removed_and_its_leases_with_it() {
    let place = Place::new();
    let store = place.open();
    assert!(!store.remove_project(&key(1), Some(event("removed"))).await.expect("there is none"));
    let mut record = store.create_project(&spec(1), POOL, NOW).await.expect("creates").record;
    add_lease(&store, 1, &lease(1), None).await.expect("adds");
    let refused = store.remove_project(&key(1), Some(event("removed"))).await.expect_err("it is absent only");
    assert!(matches!(&refused, StoreError::NotRemoving { phase, .. } if phase == "absent"), "{refused}");
    assert_eq!(store.leases(&key(1)).await.expect("reads").len(), 1);

    record.phase = Phase::Removing;
    store.save_project(&record, None).await.expect("saves");
    assert!(store.remove_project(&key(1), Some(event("removed"))).await.expect("removes"));
    assert_eq!(store.take_up().await.expect("reads"), super::super::TakenUp::default());
    assert_eq!(store.lease(&lease(1).token).await.expect("reads"), None);
    assert_eq!(store.events(0, 9).await.expect("reads").len(), 1, "the one that removed it");
    assert!(matches!(add_lease(&store, 1, &lease(2), None).await, Err(StoreError::UnknownProject { .. })));
}

#[tokio::test]
async fn a_project_that_stayed_takes_the_size_of_the_cache_that_came_back() {
    let place = Place::new();
    let store = place.open();
    let mut record = store.create_project(&spec(1), POOL, NOW).await.expect("creates").record;
    for (marked, known) in [(None, None), (Some(135_u64 << 30), Some(135_u64 << 30)), (Some(90 << 30), Some(135 << 30))]
    {
        record.cache.size = marked;
        let adopted = store.adopt_project(record.clone(), POOL, None).await.expect("finds");
        assert_eq!((adopted.record.cache.size, adopted.new), (known, false), "what it knows itself counts");
        assert_eq!(store.project(&record.key).await.expect("reads"), Some(adopted.record));
    }
}

#[tokio::test]
async fn what_is_derived_has_its_project_s_limits_and_size() {
    let place = Place::new();
    let store = place.open();
    let mut project = store.create_project(&spec(1), POOL, NOW).await.expect("creates").record;
    project.settings = Settings { tier: Some(Tier::Hot), memory_bytes: Some(1 << 30), ..Settings::default() };
    project.cache.size = Some(90 << 30);
    store.save_project(&project, None).await.expect("saves");
    let identity = Identity::pull_request(spec(1), "12").expect("a name");
    let created = store.create_project(&identity, POOL, NOW).await.expect("creates");
    let fork = created.record;
    assert_eq!((fork.settings.memory_bytes, fork.settings.tier), (Some(1 << 30), None));
    assert_eq!((fork.cache.size, fork.pull_request.as_deref()), (Some(90 << 30), Some("12")));
    assert_eq!(store.project(&fork.key).await.expect("reads"), Some(fork.clone()));
    assert_ne!(fork.address, project.address);
    let again = store.create_project(&identity, POOL, NOW).await.expect("finds");
    assert_eq!((again.record, again.new), (fork, false));
    let other = Identity { pull_request: Some("13".into()), ..identity };
    assert!(matches!(store.create_project(&other, POOL, NOW).await, Err(StoreError::OtherIdentity { .. })));
}
