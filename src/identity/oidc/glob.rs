//! Text with `*` in it.

/// Whether `text` is as `pattern` says, where `*` stands for any text, the empty one too. Takes at most as many steps as both are
/// long, multiplied.
pub(super) fn is_like(text: &str, pattern: &str) -> bool {
    let (text, pattern) = (text.as_bytes(), pattern.as_bytes());
    let (mut at, mut of) = (0, 0);
    // Where the last `*` is, and how much of the text it has not taken yet.
    let mut star: Option<(usize, usize)> = None;
    while at < text.len() {
        if pattern.get(of) == Some(&b'*') {
            star = Some((of, at));
            of += 1;
        } else if pattern.get(of) == text.get(at) {
            (at, of) = (at + 1, of + 1);
        } else if let Some((place, taken)) = star {
            star = Some((place, taken + 1));
            (at, of) = (taken + 1, place + 1);
        } else {
            return false;
        }
    }
    pattern.iter().skip(of).all(|b| *b == b'*')
}

#[cfg(test)]
mod tests {
    use super::is_like;

    #[test]
    fn stars_stand_for_any_text() {
        for (text, pattern) in [
            ("", ""),
            ("", "*"),
            ("refs/heads/main", "refs/heads/main"),
            ("refs/heads/main", "refs/heads/*"),
            ("refs/heads/", "refs/heads/*"),
            ("org/repo/.github/workflows/release.yml@refs/tags/v1", "org/*/.github/workflows/release.yml@refs/tags/*"),
            ("abab", "*ab"),
            ("aXbXc", "a*b*c"),
            ("a*b", "a**b"),
        ] {
            assert!(is_like(text, pattern), "{text} {pattern}");
        }
        for (text, pattern) in [
            ("a", ""),
            ("refs/heads/main2", "refs/heads/main"),
            ("Main", "main"),
            ("abc", "*b"),
            ("ab", "a*b*c"),
            ("", "a*"),
        ] {
            assert!(!is_like(text, pattern), "{text} {pattern}");
        }
        let long = "a".repeat(10_000);
        assert!(!is_like(&long, "*a*a*a*a*a*a*a*a*b"), "and it ends");
    }
}
