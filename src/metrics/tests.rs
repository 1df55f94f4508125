//! What a scrape shows, and that docs/metrics.md says the same.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::gateway::{Counters, State};

fn complete() -> Metrics {
    let metrics = Metrics::new();
    for level in Level::ALL {
        metrics.read_level(level, || Some(0.5));
    }
    for count in Count::ALL {
        metrics.read_count(count, || 3);
    }
    metrics.read_gateway(|| {
        Some(Figures { counted: Counters::default().snapshot(), open: State::ALL.map(|state| (state, 7)).to_vec() })
    });
    metrics
}

#[test]
fn the_documented_list_is_the_registry_s() {
    let text = complete().text(Format::Prometheus).expect("text");
    let mut shown: BTreeMap<String, (String, BTreeSet<String>)> = BTreeMap::new();
    for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (name, kind) = line.split_once(' ').expect("a name and a type");
        let label = text.lines().find_map(|line| {
            let label = line.strip_prefix(name)?.trim_start_matches("_bucket").strip_prefix('{')?;
            Some(label.split('=').next().unwrap_or_default().to_owned())
        });
        let label = label.filter(|label| label != "le" && label != "version").unwrap_or_default();
        let values = text.lines().filter_map(|line| line.split(&format!("{label}=\"")).nth(1));
        let of_this = text.lines().filter(|line| line.starts_with(name)).count();
        assert!(of_this > 0, "{name} shows nothing");
        let values = values.map(|rest| rest.split('"').next().unwrap_or_default().to_owned());
        let values = if label.is_empty() { BTreeSet::new() } else { values.collect() };
        shown.insert(format!("{name}|{kind}|{label}"), (label, values));
    }
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/metrics.md")).expect("the page");
    let mut listed = BTreeSet::new();
    for row in page.lines().filter(|line| line.starts_with("| `kiln_")) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let bare = |cell: &str| cell.trim_matches('`').to_owned();
        listed.insert(format!("{}|{}|{}", bare(cells[1]), cells[2], bare(cells[3])));
    }
    assert_eq!(listed, shown.keys().cloned().collect(), "docs/metrics.md on the left, the registry on the right");
    for (label, values) in shown.into_values().filter(|(label, _)| !label.is_empty()) {
        for value in values {
            assert!(page.contains(&format!("`{value}`")), "docs/metrics.md does not explain {label}={value}");
        }
    }
}

#[test]
fn events_are_counted_and_levels_are_read() {
    let metrics = complete();
    metrics.routed(Outcome::Ready, Duration::from_millis(2));
    metrics.routed(Outcome::Ready, Duration::from_secs(2));
    metrics.answer_lost();
    metrics.waited(Stage::Queue, Duration::from_secs(7));
    metrics.phase_changed(None, Some(PhaseLabel::Idle));
    metrics.phase_changed(None, Some(PhaseLabel::Idle));
    metrics.phase_changed(Some(PhaseLabel::Idle), Some(PhaseLabel::Warm));
    metrics.phase_changed(Some(PhaseLabel::Warm), None);
    metrics.lease_ended(LeaseEnd::Expired);
    metrics.admission_refused(Refusal::Memory);
    metrics.step_failed(StepLabel::StartInstance, Duration::from_secs(1));
    metrics.daemon_at_fault(Fault::Wedged);
    metrics.read_level(Level::Leases, || Some(4.0));
    metrics.read_level(Level::VolumeInodesUsed, || None);
    let text = metrics.text(Format::Prometheus).expect("text");
    for line in [
        "kiln_routes_total{outcome=\"ready\"} 2",
        "kiln_routes_total{outcome=\"abandoned\"} 0",
        "kiln_route_seconds_bucket{outcome=\"ready\",le=\"0.005\"} 1",
        "kiln_answers_lost_total 1",
        "kiln_wait_seconds_sum{stage=\"queue\"} 7.0",
        "kiln_projects{phase=\"idle\"} 1",
        "kiln_projects{phase=\"warm\"} 0",
        "kiln_leases_ended_total{how=\"expired\"} 1",
        "kiln_admission_refusals_total{reason=\"memory\"} 1",
        "kiln_step_failures_total{step=\"start_instance\"} 1",
        "kiln_step_seconds_count{step=\"start_instance\"} 1",
        "kiln_daemon_faults_total{fault=\"wedged\"} 1",
        "kiln_leases 4.0",
        "kiln_store_commits_total 3",
        "kiln_gateway_accepted_total 0",
        "kiln_gateway_refusals_total{reason=\"shed\"} 0",
        "kiln_gateway_connections{state=\"half_closed\"} 7.0",
    ] {
        assert!(text.lines().any(|shown| shown == line), "{line} is not in\n{text}");
    }
    assert!(!text.contains("kiln_volume_inodes_used_ratio"), "what cannot be read is left out");
    assert!(!text.contains("# EOF"));
    let open = metrics.text(Format::OpenMetrics).expect("text");
    assert!(open.ends_with("# EOF\n") && open.contains("kiln_build_info{version="), "{open}");
}

#[test]
fn phases_have_their_names() {
    let failed = kiln_domain::Phase::Failed { reason: "x".to_owned() };
    assert_eq!(PhaseLabel::from(&failed), PhaseLabel::Failed);
    assert_eq!(PhaseLabel::from(&kiln_domain::Phase::Warm), PhaseLabel::Warm);
}
