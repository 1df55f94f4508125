//! Any text as repository, name, target and architecture: a normal form is its own normal form, a key is a legal label
//! that reads back, and nothing panics. The four parts stand in the input one per line.
#![no_main]

use kiln_domain::{BuildSpec, Key, RepoName};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(once) = RepoName::parse(text) {
        assert_eq!(RepoName::parse(once.as_str()).as_ref(), Ok(&once), "not stable");
    }
    let mut parts = text.split('\n');
    let mut part = || parts.next().unwrap_or("");
    let (repo, name, target) = (part(), part(), part());
    let arch = parts.next().unwrap_or("amd64");
    let Ok(spec) = BuildSpec::new(repo, name, target, arch) else { return };
    let again = BuildSpec::new(spec.repo.as_str(), &spec.name, &spec.target, spec.arch.as_str());
    assert_eq!(again.as_ref(), Ok(&spec), "the normal form is another project");
    let key = Key::of(&spec);
    for key in [key.clone(), key.fork(), key.clone_number(7)] {
        assert_eq!(key.as_str().parse::<Key>().as_ref(), Ok(&key));
        assert!(key.daemon_name().len() <= 63);
        assert_eq!(Key::from_server_name(&key.server_name("kiln.internal"), "kiln.internal"), Some(key));
    }
});
