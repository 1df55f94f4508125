//! Medians, in Markdown.

use std::collections::BTreeMap;
use std::fmt;

#[derive(Default)]
pub(crate) struct Table {
    figures: Vec<String>,
    proxies: Vec<&'static str>,
    values: BTreeMap<(String, &'static str), Vec<f64>>,
}

impl Table {
    pub(crate) fn add(&mut self, figure: &str, proxy: &'static str, value: f64) {
        if !self.figures.iter().any(|known| known == figure) {
            self.figures.push(figure.to_owned());
        }
        if !self.proxies.contains(&proxy) {
            self.proxies.push(proxy);
        }
        self.values.entry((figure.to_owned(), proxy)).or_default().push(value);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "| median (smallest) | {} |", self.proxies.join(" | "))?;
        writeln!(f, "|---{}|", "|---".repeat(self.proxies.len()))?;
        for figure in &self.figures {
            write!(f, "| {figure} ")?;
            for proxy in &self.proxies {
                let mut values = self.values.get(&(figure.clone(), *proxy)).cloned().unwrap_or_default();
                values.sort_by(f64::total_cmp);
                match (values.get(values.len() / 2), values.first()) {
                    (Some(median), Some(smallest)) => write!(f, "| {} ({}) ", short(*median), short(*smallest))?,
                    _ => write!(f, "| – ")?,
                }
            }
            writeln!(f, "|")?;
        }
        Ok(())
    }
}

/// Three digits that count.
fn short(value: f64) -> String {
    match value.abs() {
        large if large >= 100.0 => format!("{value:.0}"),
        middle if middle >= 10.0 => format!("{value:.1}"),
        small if small >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}
