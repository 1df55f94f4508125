//! Whose word is it: kiln's or buildx's?
//!
//! Kiln's flags may stand anywhere between buildx's, so the words are walked once with what each flag of
//! `buildx build` takes. A flag that is not known (a newer buildx) takes the next word unless that looks like a flag;
//! a wrong guess can only hide a word from kiln, never change what buildx gets.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;

/// Kiln's own flags on `kiln build`.
const OWN_VALUED: [&str; 8] = ["repo", "name", "arch", "pull-request", "branch", "wait", "socket", "url"];
const OWN_BARE: [&str; 3] = ["untrusted", "dry-run", "help"];

/// Flags of `buildx build` that take no word (buildx v0.38, commands/build.go), the hidden ones included.
const BARE: [&str; 12] = [
    "check",
    "compress",
    "debug",
    "disable-content-trust",
    "force-rm",
    "load",
    "no-cache",
    "pull",
    "push",
    "quiet",
    "rm",
    "squash",
];
const BARE_SHORT: &[u8] = b"Dqh";

/// Flags of `buildx build` that take a word, whatever it looks like.
const VALUED: [&str; 39] = [
    "add-host",
    "allow",
    "annotation",
    "attest",
    "build-arg",
    "build-context",
    "builder",
    "cache-from",
    "cache-to",
    "call",
    "cgroup-parent",
    "cpu-period",
    "cpu-quota",
    "cpu-shares",
    "cpuset-cpus",
    "cpuset-mems",
    "file",
    "iidfile",
    "isolation",
    "label",
    "memory",
    "memory-swap",
    "metadata-file",
    "network",
    "no-cache-filter",
    "output",
    "platform",
    "policy",
    "print",
    "progress",
    "provenance",
    "resource",
    "sbom",
    "secret",
    "security-opt",
    "shm-size",
    "ssh",
    "tag",
    "target",
];

#[derive(Debug, PartialEq, Eq)]
enum Item<'a> {
    /// One flag with its value; the words it was written in.
    Flag { name: &'a [u8], value: Option<&'a OsStr>, words: &'a [OsString] },
    /// A word that is no flag and no flag's value.
    Plain(&'a OsString),
    /// `--`: flags end here.
    End(&'a OsString),
}

/// What kiln needs to know of buildx's arguments.
#[derive(Debug, PartialEq, Eq, Default)]
pub(super) struct Meaning<'a> {
    pub(super) target: Option<&'a OsStr>,
    pub(super) context: Option<&'a OsStr>,
    pub(super) names_a_builder: bool,
}

/// Puts kiln's own words in front of a `--` and buildx's behind it, so that clap can read `kiln build …`. Any other
/// command line is left alone.
pub(super) fn arrange(words: Vec<OsString>) -> Vec<OsString> {
    let Some(verb) = verb_of(&words) else { return words };
    if words[verb] != "build" {
        return words;
    }
    let (mut arranged, rest) = (words[..=verb].to_vec(), &words[verb + 1..]);
    let mut buildx = Vec::new();
    let mut own = false;
    for item in walk(rest) {
        match item {
            Item::Flag { name, words, .. } => {
                own = is_one_of(name, &OWN_VALUED) || is_one_of(name, &OWN_BARE) || (name == b"h" && words[0] == "-h");
                if own { arranged.extend_from_slice(words) } else { buildx.extend_from_slice(words) }
            }
            Item::Plain(word) | Item::End(word) => buildx.push(word.clone()),
        }
    }
    // A flag at the end that misses its value: clap says so best when nothing follows.
    if !(own && buildx.is_empty()) {
        arranged.push("--".into());
    }
    arranged.extend(buildx);
    arranged
}

/// Reads what was given to buildx.
pub(super) fn read(buildx: &[OsString]) -> Meaning<'_> {
    let mut meaning = Meaning::default();
    for item in walk(buildx) {
        match item {
            Item::Flag { name: b"target", value, .. } => meaning.target = value,
            Item::Flag { name: b"builder", .. } => meaning.names_a_builder = true,
            Item::Plain(word) if meaning.context.is_none() => meaning.context = Some(word),
            Item::Flag { .. } | Item::Plain(_) | Item::End(_) => {}
        }
    }
    meaning
}

/// The index of the subcommand: the first word that is no flag.
fn verb_of(words: &[OsString]) -> Option<usize> {
    let mut index = 1;
    loop {
        let word = words.get(index)?.as_bytes();
        if !word.starts_with(b"-") {
            return Some(index);
        }
        index += if word == b"--socket" || word == b"--url" { 2 } else { 1 };
    }
}

fn walk(words: &[OsString]) -> Vec<Item<'_>> {
    let mut items = Vec::new();
    let mut rest = words;
    while let Some((first, after)) = rest.split_first() {
        let word = first.as_bytes();
        if word == b"--" {
            items.push(Item::End(first));
            items.extend(after.iter().map(Item::Plain));
            break;
        }
        let used = match word {
            [b'-', b'-', name @ ..] => long(name, rest, &mut items),
            [b'-', letters @ ..] if !letters.is_empty() => short(letters, rest, &mut items),
            _ => {
                items.push(Item::Plain(first));
                1
            }
        };
        rest = &rest[used..];
    }
    items
}

/// Reads one `--flag`; returns how many words it used.
fn long<'a>(name: &'a [u8], rest: &'a [OsString], items: &mut Vec<Item<'a>>) -> usize {
    let (name, inline) = match name.iter().position(|b| *b == b'=') {
        Some(at) => (&name[..at], Some(OsStr::from_bytes(&name[at + 1..]))),
        None => (name, None),
    };
    let next = rest.get(1).filter(|_| inline.is_none() && takes_next(name, rest.get(1)));
    let used = 1 + usize::from(next.is_some());
    items.push(Item::Flag { name, value: inline.or(next.map(OsString::as_os_str)), words: &rest[..used] });
    used
}

fn takes_next(name: &[u8], next: Option<&OsString>) -> bool {
    if is_one_of(name, &BARE) || is_one_of(name, &OWN_BARE) {
        false
    } else if is_one_of(name, &VALUED) || is_one_of(name, &OWN_VALUED) {
        true
    } else {
        next.is_some_and(|word| !word.as_bytes().starts_with(b"-"))
    }
}

/// Reads a cluster such as `-qt name` or `-fDockerfile`: all but its last letter are bare.
fn short<'a>(letters: &'a [u8], rest: &'a [OsString], items: &mut Vec<Item<'a>>) -> usize {
    let valued = letters.iter().position(|letter| !BARE_SHORT.contains(letter));
    let Some(at) = valued else {
        items.push(Item::Flag { name: letters, value: None, words: &rest[..1] });
        return 1;
    };
    let (name, inline) = (&letters[at..=at], &letters[at + 1..]);
    let next = rest.get(1).filter(|_| inline.is_empty());
    let used = 1 + usize::from(next.is_some());
    let value = if inline.is_empty() { next.map(OsString::as_os_str) } else { Some(OsStr::from_bytes(inline)) };
    items.push(Item::Flag { name, value, words: &rest[..used] });
    used
}

fn is_one_of(name: &[u8], names: &[&str]) -> bool {
    names.iter().any(|known| known.as_bytes() == name)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::super::args::{BuildArgs, Cli, Verb};
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(OsString::from).collect()
    }

    fn arranged(line: &str) -> String {
        let words = arrange(words(line));
        words.iter().map(|w| w.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }

    fn parsed(line: &str) -> (Cli, BuildArgs) {
        let mut cli = Cli::try_parse_from(arrange(words(line))).unwrap_or_else(|e| panic!("{line}: {e}"));
        let Verb::Build(args) = std::mem::replace(&mut cli.verb, Verb::Ps(super::super::args::JsonArg { json: false }))
        else {
            panic!("{line}: not a build")
        };
        (cli, args)
    }

    #[test]
    fn buildx_gets_its_words_untouched_and_in_order() {
        let line = "kiln build --build-arg A=1 -t x:1 --repo h/r --push --target=run --platform linux/amd64 \
                    --untrusted -f Dockerfile.prod --secret id=a,src=b --wait 7s --progress plain -o type=oci,dest=x -q .";
        let (_, args) = parsed(line);
        assert_eq!(
            args.buildx,
            words(
                "--build-arg A=1 -t x:1 --push --target=run --platform linux/amd64 -f Dockerfile.prod \
                 --secret id=a,src=b --progress plain -o type=oci,dest=x -q ."
            )
        );
        assert_eq!(args.identity.repo.as_deref(), Some("h/r"));
        assert!(args.asking.lane.untrusted);
        assert_eq!(args.asking.wait.as_secs(), 7);
    }

    #[test]
    fn kiln_s_flags_may_come_after_the_context_and_before_the_verb() {
        let (cli, args) = parsed("kiln --socket /s build . --name=api --arch arm64 --pull");
        assert_eq!((cli.connection.socket.to_str(), args.identity.name.as_str()), (Some("/s"), "api"));
        assert_eq!(args.identity.arch.as_deref(), Some("arm64"));
        assert_eq!(args.buildx, words(". --pull"));
    }

    #[test]
    fn a_pull_request_and_a_branch_are_kiln_s() {
        let (_, args) = parsed("kiln build -t x --pull-request 12 . --untrusted --branch=feature/x --pull");
        assert_eq!(
            (args.asking.lane.pull_request.as_deref(), args.asking.branch.as_deref()),
            (Some("12"), Some("feature/x"))
        );
        assert_eq!(args.buildx, words("-t x . --pull"));
        let given = words("--branch main --pull-request 12 dir");
        assert_eq!(read(&given).context, Some(OsStr::new("dir")), "their values are no context");
    }

    #[test]
    fn a_value_that_looks_like_a_flag_is_a_value() {
        let (_, args) = parsed("kiln build --label --repo --build-arg --name=x .");
        assert_eq!(args.buildx, words("--label --repo --build-arg --name=x ."));
        assert_eq!(args.identity.repo, None);
    }

    #[test]
    fn after_two_dashes_everything_is_buildx_s_and_they_reach_it() {
        let (_, args) = parsed("kiln build -t x -- --repo");
        assert_eq!(args.buildx, words("-t x -- --repo"));
        assert_eq!(read(&args.buildx).context, Some(OsStr::new("--repo")));
    }

    #[test]
    fn other_verbs_are_left_alone() {
        for line in ["kiln", "kiln ps --json", "kiln --socket build ps", "kiln route --repo h/r build", "kiln --help"] {
            assert_eq!(arranged(line), line);
        }
    }

    #[test]
    fn help_is_kiln_s() {
        assert_eq!(arranged("kiln build -t x --help"), "kiln build --help -- -t x");
        assert_eq!(arranged("kiln build -h"), "kiln build -h");
        assert_eq!(arranged("kiln build -t x --repo"), "kiln build --repo -- -t x");
    }

    #[test]
    fn meaning() {
        let check = |line: &str, target: Option<&str>, context: Option<&str>| {
            let given = words(line);
            let meaning = read(&given);
            assert_eq!(meaning.target, target.map(OsStr::new), "target of {line}");
            assert_eq!(meaning.context, context.map(OsStr::new), "context of {line}");
        };
        check("--target x .", Some("x"), Some("."));
        check("--target=x dir", Some("x"), Some("dir"));
        check("--target=a --target b .", Some("b"), Some("."));
        check("--target= .", Some(""), Some("."));
        check("-t tag -f file .", None, Some("."));
        check("-ttag -fDockerfile ctx", None, Some("ctx"));
        check("-qt tag ctx", None, Some("ctx"));
        check("-q ctx", None, Some("ctx"));
        check("--push ctx --load", None, Some("ctx"));
        check("--check ctx", None, Some("ctx"));
        check("--no-cache --pull -", None, Some("-"));
        check("--no-cache-filter stage -", None, Some("-"));
        check("--newer-flag value ctx", None, Some("ctx"));
        check("--newer-flag --target x ctx", Some("x"), Some("ctx"));
        check("--build-arg --target=no .", None, Some("."));
        check("--tag", None, None);
        check("", None, None);
    }

    #[test]
    fn a_builder_is_seen() {
        assert!(read(&words("--builder x .")).names_a_builder);
        assert!(read(&words("--builder=x .")).names_a_builder);
        assert!(!read(&words("--label --builder .")).names_a_builder);
    }

    #[test]
    fn words_that_are_no_text_pass_through() {
        let odd = OsString::from(OsStr::from_bytes(b"--file=\xff"));
        let given = vec!["kiln".into(), "build".into(), odd.clone(), "--repo=h/r".into(), OsString::from(".")];
        assert_eq!(
            arrange(given),
            ["kiln".into(), "build".into(), "--repo=h/r".into(), "--".into(), odd, OsString::from(".")]
        );
    }
}
