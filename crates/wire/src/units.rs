//! Spans and sizes as people write them: `15m`, `1h 30m`, `20GiB`.

use std::fmt::Write as _;
use std::time::Duration;

const SPANS: [(&str, u64); 5] = [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)];
const SIZES: [(&str, u32); 5] = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40), ("B", 0)];

/// `90s`, `15m`, `1h 30m`, `2d`; `None` is what is written otherwise. A number needs its unit.
pub fn parse_span(text: &str) -> Option<Duration> {
    let mut millis = 0_u64;
    let mut rest = text.trim();
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit())?;
        let number: u64 = rest[..digits].parse().ok()?;
        let after = rest[digits..].trim_start();
        let letters = after.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(after.len());
        let factor = SPANS.iter().find(|(unit, _)| *unit == &after[..letters])?.1;
        millis = millis.checked_add(number.checked_mul(factor)?)?;
        rest = after[letters..].trim_start();
    }
    Some(Duration::from_millis(millis))
}

/// As [`parse_span`] reads it, in the largest units that fit: `1h 30m`. Whole milliseconds.
pub fn show_span(span: Duration) -> String {
    let mut rest = u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
    if rest == 0 {
        return "0s".to_owned();
    }
    let mut text = String::new();
    for (unit, factor) in SPANS.iter().rev() {
        let count = rest / factor;
        rest %= factor;
        if count > 0 {
            let gap = if text.is_empty() { "" } else { " " };
            let _ = write!(text, "{gap}{count}{unit}");
        }
    }
    text
}

/// `20GiB`, `512 MiB`, `4096B`; a bare number is bytes.
pub fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let (number, shift) = SIZES
        .iter()
        .find_map(|(unit, shift)| text.strip_suffix(unit).map(|number| (number, *shift)))
        .unwrap_or((text, 0));
    let number = number.trim_end();
    // `parse` would take a sign too.
    if !number.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// As [`parse_size`] reads it, in the largest unit that divides it.
pub fn show_size(bytes: u64) -> String {
    for (unit, shift) in SIZES[..4].iter().rev() {
        if bytes != 0 && bytes.is_multiple_of(1 << shift) {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    format!("{bytes}B")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn spans() {
        for (text, seconds) in [
            ("90s", 90),
            ("15m", 900),
            ("1h 30m", 5400),
            ("1h30m", 5400),
            (" 2 h ", 7200),
            ("1d", 86_400),
            ("0s", 0),
            ("2000ms", 2),
        ] {
            assert_eq!(parse_span(text), Some(Duration::from_secs(seconds)), "{text}");
        }
        for text in ["", " ", "15", "m", "-1m", "1.5h", "15M", "15 min", "1h 30", "99999999999999999999s", "1h,30m"] {
            assert_eq!(parse_span(text), None, "{text}");
        }
        assert_eq!(parse_span(&format!("{}d", u64::MAX)), None, "no overflow");
        assert_eq!(show_span(Duration::from_millis(5_400_500)), "1h 30m 500ms");
    }

    #[test]
    fn sizes() {
        for (text, bytes) in [("20GiB", 20 << 30), ("512 MiB", 512 << 20), ("4096", 4096), ("4096B", 4096), ("0B", 0)] {
            assert_eq!(parse_size(text), Some(bytes), "{text}");
        }
        for text in ["", "GiB", "-1GiB", "+1GiB", "1.5GiB", "20GB", "99999999999TiB", "1GiBB"] {
            assert_eq!(parse_size(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn what_is_shown_can_be_read(millis in any::<u32>(), bytes in any::<u64>(), text in any::<String>()) {
            let span = Duration::from_millis(millis.into());
            prop_assert_eq!(parse_span(&show_span(span)), Some(span));
            prop_assert_eq!(parse_size(&show_size(bytes)), Some(bytes));
            let _ = (parse_span(&text), parse_size(&text));
        }
    }
}
