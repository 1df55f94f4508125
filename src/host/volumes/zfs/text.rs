//! Our strings as values of user properties: one line of printable ASCII each, so that a row of `zfs get` stays a row.

use std::fmt::Write as _;

use super::super::record::KEY_PROPERTY;
use crate::host::Properties;

/// `ZAP_MAXVALUELEN`, less its NUL.
pub(super) const LONGEST_VALUE: usize = 8191;

/// Properties as a JSON object of strings.
pub(super) fn encode(properties: &Properties) -> String {
    let object = properties.iter().map(|(name, value)| (name.clone(), value.clone().into())).collect();
    escape(&serde_json::Value::Object(object).to_string())
}

/// `None` for what we did not write.
pub(super) fn decode(text: &str) -> Option<Properties> {
    let properties: Properties = serde_json::from_str(&unescape(text)?).ok()?;
    properties.contains_key(KEY_PROPERTY).then_some(properties)
}

/// Whatever is not printable ASCII, and `%`, as `%` and two digits. JSON has made the control characters of its strings
/// printable already, so this is for letters beyond ASCII.
fn escape(text: &str) -> String {
    text.bytes().fold(String::with_capacity(text.len()), |mut escaped, byte| {
        if (0x20..0x7f).contains(&byte) && byte != b'%' {
            escaped.push(char::from(byte));
        } else {
            // Writing to a string does not fail.
            let _ = write!(escaped, "%{byte:02x}");
        }
        escaped
    })
}

fn unescape(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        if *first == b'%' {
            let digits = std::str::from_utf8(tail.get(..2)?).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            rest = &tail[2..];
        } else {
            bytes.push(*first);
            rest = tail;
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn with_key(pairs: &[(&str, &str)]) -> Properties {
        let given = pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        given.chain([(KEY_PROPERTY.to_owned(), "p".to_owned())]).collect()
    }

    #[test]
    fn people_can_read_it() {
        let text = encode(&with_key(&[("repo", "github.com/o/r"), ("odd", "100 %\n\u{fc}")]));
        assert_eq!(text, r#"{"key":"p","odd":"100 %25\n%c3%bc","repo":"github.com/o/r"}"#);
    }

    #[test]
    fn what_is_not_ours_is_nothing() {
        for text in [
            "",
            "-",
            "{}",
            "[]",
            "{\"key\":1}",
            "{\"key\":\"p\"",
            "{\"key\":\"%\"}",
            "{\"key\":\"%zz\"}",
            "{\"key\":\"%ff\"}",
        ] {
            assert_eq!(decode(text), None, "{text:?} was taken for properties");
        }
    }

    proptest! {
        #[test]
        fn any_string_survives_on_one_line(name in ".*", value in "(?s).*") {
            let properties = with_key(&[(&name, &value)]);
            let text = encode(&properties);
            prop_assert!(text.bytes().all(|b| (0x20..0x7f).contains(&b)), "{text:?}");
            prop_assert_eq!(decode(&text), Some(properties));
        }
    }
}
