//! What the gateway has counted, read at a scrape.

use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use crate::gateway::{Figures, Snapshot};

pub(super) fn encode(encoder: &mut DescriptorEncoder<'_>, figures: &Figures) -> fmt::Result {
    let Snapshot { accepted, accept_failures, relayed, broken, to_daemons, to_clients, refused, .. } = &figures.counted;
    for (name, help, count) in [
        ("gateway_accepted", "Connections that were accepted", accepted),
        (
            "gateway_accept_failures",
            "Connections that could not be accepted, for want of descriptors or memory",
            accept_failures,
        ),
        ("gateway_relayed", "Connections that reached a daemon", relayed),
        ("gateway_broken", "Relayed connections that did not end in good order", broken),
    ] {
        let counter = ConstCounter::new(*count);
        counter.encode(encoder.encode_descriptor(name, help, None, MetricType::Counter)?)?;
    }
    let bytes = [("to_daemon", *to_daemons), ("to_client", *to_clients)];
    counters(
        encoder,
        "gateway_bytes",
        "Bytes of relayed connections that have ended, by direction",
        "direction",
        bytes,
    )?;
    let refusals = refused.iter().map(|(refusal, count)| (refusal.as_str(), *count));
    counters(encoder, "gateway_refusals", "Connections that were not relayed, by reason", "reason", refusals)?;
    let help = "Connections that are open, by state";
    let mut family = encoder.encode_descriptor("gateway_connections", help, None, MetricType::Gauge)?;
    for (state, count) in &figures.open {
        ConstGauge::new(*count as f64).encode(family.encode_family(&[("state", state.as_str())])?)?;
    }
    Ok(())
}

fn counters(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    label: &'static str,
    values: impl IntoIterator<Item = (&'static str, u64)>,
) -> fmt::Result {
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (value, count) in values {
        ConstCounter::new(count).encode(family.encode_family(&[(label, value)])?)?;
    }
    Ok(())
}
