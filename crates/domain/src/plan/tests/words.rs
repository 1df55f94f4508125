//! Each plan, told to people.

use super::*;

#[test]
fn why_in_ten_situations() {
    let connected = Case { connections: 1, leases: vec![lease_of(0)], now: at(100), ..Case::new(running(true)) };
    let leased = Case { leases: vec![lease_of(0)], now: at(100), ..Case::new(running(true)) };
    let mut hot = Case::new(running(true));
    hot.settings.tier = Some(Tier::Hot);
    let lingering = Case { now: at(300), ..Case::new(running(true)) };
    let mut idle = Case { now: at(5000), ..Case::new(InstanceSeen::STOPPED) };
    idle.record.phase = Phase::Idle;
    let mut queued = Case::waiting(InstanceSeen::STOPPED);
    queued.record.phase = Phase::Idle;
    queued.place = Place::Queued { position: 2, length: 5, waits_for: WaitsFor::Starts { under_way: 4 } };
    let held = Case { leases: vec![lease_of(0)], now: at(700), ..Case::new(outdated(running(true))) };
    let mut failed = Case { leases: vec![lease_of(0)], now: at(3), ..Case::new(InstanceSeen::STOPPED) };
    failed.record.phase = Phase::Failed { reason: "could not start instance: no space".into() };
    failed.setbacks = Setbacks::default().and_another(at(0)).and_another(at(1)).and_another(at(2));
    let building = Case { now: at(5000), builds: Some(1), ..Case::new(running(true)) };
    let mut wedged = Case { now: at(100), ..Case::new(running(true)) };
    wedged.health = Some(silent(100, 60, |_| Duration::ZERO));
    for (case, words) in [
        (connected, &["warm, because 1 open connection", "until 1 h 58 min from now", "1 connection(s)"][..]),
        (leased, &["warm, because 1 live lease", "counts for another 8 min 20 s unless it is renewed"]),
        (hot, &["warm, because the project is hot", "comes up again when it died"]),
        (lingering, &["idle window of 15 min is open", "stopped in 10 min; its cache stays", "0 build(s) in a day"]),
        (idle, &["idle, because its idle window of 15 min has passed", "last activity 1 h 23 min ago"]),
        (queued, &["number 2 of 5", "4 other start(s) are under way", "1 request(s) wait"]),
        (held, &["out of date (the image)", "holds that back for another 48 min 20 s", "keeps nothing up"]),
        (failed, &["failed: could not start instance: no space", "3 setback(s)", "tried again in 3 s, or at once"]),
        (building, &["1 build(s) run in it, by its own account", "asked again in 30 s"]),
        (wedged, &["about to force instance to stop", "it is wedged: 7 calls unanswered in 1 min"]),
    ] {
        let why = case.why();
        for wanted in words {
            assert!(why.contains(wanted), "wanted {wanted:?} in:\n{why}");
        }
    }
}
