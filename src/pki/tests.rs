//! What the certificates are worth, judged by the TLS library that will see them.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::{Arc, Barrier};

use rustls::RootCertStore;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;

use super::*;

const NOW: Timestamp = Timestamp::from_millis(1_800_000_000_000);
const HOUR: Duration = Duration::from_hours(1);

struct Bench {
    state: tempfile::TempDir,
    pki: Pki,
    key: Key,
    names: DaemonNames,
}

fn bench() -> Bench {
    let state = tempfile::tempdir().expect("a directory");
    let pki = Pki::new(state.path()).expect("made");
    let key: Key = "pbcce5b6205652dd7".parse().expect("a key");
    let names = DaemonNames {
        server_names: vec![key.server_name("builds.example.com")],
        addresses: vec!["10.88.0.7".parse().expect("an address"), "fd00::7".parse().expect("an address")],
    };
    Bench { state, pki, key, names }
}

impl Bench {
    fn seen(&self, names: &DaemonNames, now: Timestamp) -> FilesSeen {
        self.pki.files(&self.key, names, now).expect("looked")
    }

    fn written() -> Self {
        let bench = bench();
        bench.pki.write_daemon_files(&bench.key, &bench.names, NOW).expect("written");
        bench
    }

    fn authority(&self, file: &str) -> PathBuf {
        self.state.path().join("pki").join(self.key.as_str()).join(file)
    }

    fn daemon(&self, file: &str) -> PathBuf {
        self.pki.daemon_directory(&self.key).join(file)
    }
}

/// What a daemon that trusts `ca` says to a client with `certificate`.
fn daemon_accepts(ca: &str, certificate: &str, now: Timestamp) -> bool {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(ca.as_bytes()).expect("a certificate")).expect("a root");
    let provider = Arc::new(aws_lc_rs::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build().expect("a verifier");
    let leaf = CertificateDer::from_pem_slice(certificate.as_bytes()).expect("a certificate");
    let when = UnixTime::since_unix_epoch(Duration::from_millis(now.as_millis().unsigned_abs()));
    verifier.verify_client_cert(&leaf, &[], when).is_ok()
}

#[test]
fn files_are_private() {
    let bench = Bench::written();
    for file in
        [bench.authority("ca.key"), bench.authority("ca.pem"), bench.daemon("key.pem"), bench.daemon("cert.pem")]
    {
        let mode = fs::metadata(&file).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{}", file.display());
        let directory = file.parent().expect("a directory");
        assert_eq!(
            fs::metadata(directory).expect("there").permissions().mode() & 0o777,
            0o700,
            "{}",
            directory.display()
        );
    }
    let left: Vec<_> = fs::read_dir(bench.state.path().join("pki")).expect("read").collect();
    assert_eq!(left.len(), 1, "something was left behind");
}

#[test]
fn a_daemon_s_files_are_current_until_something_changes() {
    let bench = bench();
    assert_eq!(bench.seen(&bench.names, NOW), FilesSeen::Stale, "there are none");
    bench.pki.write_daemon_files(&bench.key, &bench.names, NOW).expect("written");
    assert_eq!(bench.seen(&bench.names, NOW), FilesSeen::Current);
    assert_eq!(bench.seen(&bench.names, NOW.plus(DAY * 334)), FilesSeen::Current);
    assert_eq!(bench.seen(&bench.names, NOW.plus(DAY * 336)), FilesSeen::Stale, "less than a month is left");
    assert_eq!(bench.seen(&bench.names, earlier(NOW, HOUR)), FilesSeen::Stale, "not valid yet");

    let fewer = DaemonNames { addresses: Vec::new(), ..bench.names.clone() };
    let more = DaemonNames {
        server_names: [&bench.names.server_names[..], &["other.example".to_owned()]].concat(),
        ..fewer.clone()
    };
    assert_eq!(bench.seen(&fewer, NOW), FilesSeen::Stale, "an address too many");
    assert_eq!(bench.seen(&more, NOW), FilesSeen::Stale, "a name too few");
    bench.pki.write_daemon_files(&bench.key, &more, NOW).expect("written");
    assert_eq!(bench.seen(&more, NOW), FilesSeen::Current);
}

#[test]
fn damaged_daemon_files_are_stale_and_made_again_with_the_same_authority() {
    let bench = Bench::written();
    let authority = fs::read(bench.authority("ca.pem")).expect("read");
    let other = Bench::written();
    for (file, contents) in [
        ("cert.pem", b"-----BEGIN CERTIFICATE-----\nMIIB".to_vec()),
        ("key.pem", Vec::new()),
        ("key.pem", fs::read(other.daemon("key.pem")).expect("read")),
        ("ca.pem", vec![0xff, 0xfe]),
        ("ca.pem", fs::read(other.daemon("ca.pem")).expect("read")),
    ] {
        fs::write(bench.daemon(file), contents).expect("written");
        assert_eq!(bench.seen(&bench.names, NOW), FilesSeen::Stale, "{file}");
        bench.pki.write_daemon_files(&bench.key, &bench.names, NOW).expect("written");
        assert_eq!(bench.seen(&bench.names, NOW), FilesSeen::Current);
    }
    for file in ["ca.pem", "cert.pem", "key.pem"] {
        fs::copy(other.daemon(file), bench.daemon(file)).expect("copied");
    }
    assert_eq!(bench.seen(&bench.names, NOW), FilesSeen::Stale, "whole, and another project's");
    assert_eq!(fs::read(bench.authority("ca.pem")).expect("read"), authority);
}

#[test]
fn a_damaged_authority_is_an_error_and_left_as_it_is() {
    let spoil: [(&str, Option<&[u8]>); 5] = [
        ("ca.pem", None),
        ("ca.key", None),
        ("ca.key", Some(b"")),
        ("ca.pem", Some(b"-----BEGIN CERTIFICATE-----\nMIIB")),
        ("ca.pem", Some(&[0xff, 0xfe])),
    ];
    for (file, contents) in spoil {
        let bench = Bench::written();
        match contents {
            Some(contents) => fs::write(bench.authority(file), contents).expect("written"),
            None => fs::remove_file(bench.authority(file)).expect("removed"),
        }
        for error in [
            bench.pki.files(&bench.key, &bench.names, NOW).map(|_| ()),
            bench.pki.write_daemon_files(&bench.key, &bench.names, NOW),
            bench.pki.issue_credential(&bench.key, NOW, NOW.plus(HOUR)).map(|_| ()),
        ] {
            let text = error.expect_err("damaged").to_string();
            assert!(text.contains(file) && text.contains(bench.key.as_str()) && text.contains("restore"), "{text}");
        }
        assert_eq!(fs::read(bench.authority(file)).ok().as_deref(), contents, "it was changed");
    }
}

#[test]
fn an_authority_with_another_s_key_is_an_error() {
    let (bench, other) = (Bench::written(), Bench::written());
    fs::copy(other.authority("ca.key"), bench.authority("ca.key")).expect("copied");
    let error = bench.pki.issue_credential(&bench.key, NOW, NOW.plus(HOUR)).expect_err("mismatch");
    assert!(error.to_string().contains("does not belong"), "{error}");
}

#[test]
fn an_authority_near_its_end_says_so_in_time() {
    let bench = Bench::written();
    let late = NOW.plus(DAY * (3650 - 20));
    assert!(matches!(bench.pki.files(&bench.key, &bench.names, late), Err(PkiError::AuthorityOutOfTime { .. })));
    let early = earlier(NOW, DAY * 30);
    assert!(matches!(bench.pki.files(&bench.key, &bench.names, early), Err(PkiError::AuthorityOutOfTime { .. })));
    // Nothing outlives it, and nothing is stale as soon as it is written.
    let last = NOW.plus(DAY * (3650 - 31));
    bench.pki.write_daemon_files(&bench.key, &bench.names, last).expect("written");
    assert_eq!(bench.seen(&bench.names, last), FilesSeen::Current);
    let credential = bench.pki.issue_credential(&bench.key, last, last.plus(DAY * 60)).expect("issued");
    assert_eq!(credential.expires, NOW.plus(CA_LIFETIME));
}

#[test]
fn a_credential_opens_its_own_project_until_it_expires() {
    let bench = bench();
    let other: Key = "p9f75a8e0cb6e0600".parse().expect("a key");
    let mine = bench.pki.issue_credential(&bench.key, NOW, NOW.plus(HOUR)).expect("issued");
    let theirs = bench.pki.issue_credential(&other, NOW, NOW.plus(HOUR)).expect("issued");
    assert_eq!(mine.expires, NOW.plus(HOUR));
    assert!(daemon_accepts(&mine.ca, &mine.cert, NOW));
    assert!(
        daemon_accepts(&mine.ca, &mine.cert, earlier(NOW, Duration::from_mins(4))),
        "a daemon whose clock is behind"
    );
    assert!(daemon_accepts(&mine.ca, &mine.cert, NOW.plus(HOUR)));
    assert!(!daemon_accepts(&mine.ca, &mine.cert, NOW.plus(HOUR + Duration::from_secs(1))), "expired");
    assert!(!daemon_accepts(&theirs.ca, &mine.cert, NOW), "another project's daemon");
    assert!(matches!(bench.pki.issue_credential(&bench.key, NOW, NOW), Err(PkiError::AlreadyOver(_))));
    assert!(!format!("{mine:?}").contains("PRIVATE"));

    // Neither kind can stand in for the other.
    bench.pki.write_daemon_files(&bench.key, &bench.names, NOW).expect("written");
    let daemon = fs::read_to_string(bench.daemon("cert.pem")).expect("read");
    assert!(!daemon_accepts(&mine.ca, &daemon, NOW), "a daemon's certificate is no credential");
    fs::write(bench.daemon("cert.pem"), &mine.cert).expect("written");
    fs::write(bench.daemon("key.pem"), &mine.key).expect("written");
    assert_eq!(bench.seen(&bench.names, NOW), FilesSeen::Stale, "a credential is no daemon's certificate");
}

#[test]
fn names_that_no_certificate_can_carry_are_refused() {
    let bench = bench();
    for name in ["", "a b", "b\u{fc}ild.example", "10.0.0.1", &"a".repeat(300)] {
        let names = DaemonNames { server_names: vec![name.to_owned()], addresses: Vec::new() };
        let outcome = bench.pki.write_daemon_files(&bench.key, &names, NOW);
        assert!(matches!(outcome, Err(PkiError::Name(_))), "{name:?} gave {outcome:?}");
    }
    let outcome = bench.pki.write_daemon_files(&bench.key, &DaemonNames::default(), NOW);
    assert!(matches!(outcome, Err(PkiError::NoNames(_))));
}

#[test]
fn concurrent_first_use_makes_one_authority() {
    let bench = bench();
    let start = Barrier::new(8);
    let authorities: BTreeSet<String> = std::thread::scope(|scope| {
        let issue = || {
            start.wait();
            bench.pki.issue_credential(&bench.key, NOW, NOW.plus(HOUR)).expect("issued").ca
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(issue)).collect();
        threads.into_iter().map(|t| t.join().expect("no panic")).collect()
    });
    assert_eq!(authorities.len(), 1);
    assert_eq!(fs::read_dir(bench.state.path().join("pki")).expect("read").count(), 1, "something was left behind");
}

#[test]
fn leftovers_of_a_crash_are_swept_and_removal_is_whole() {
    let bench = Bench::written();
    let torn = bench.state.path().join("pki/.new-abc");
    fs::create_dir(&torn).expect("made");
    fs::write(torn.join("ca.key"), "half").expect("written");
    fs::write(bench.daemon(".cert.pem.new"), "half").expect("written");
    let pki = Pki::new(bench.state.path()).expect("opened again");
    assert!(!torn.exists());
    assert_eq!(bench.seen(&bench.names, NOW), FilesSeen::Current);
    pki.write_daemon_file(&bench.key, "buildkitd.toml", "root = \"/x\"\n").expect("written");
    assert_eq!(pki.read_daemon_file(&bench.key, "buildkitd.toml").expect("read").as_deref(), Some("root = \"/x\"\n"));
    for _ in 0..2 {
        pki.remove(&bench.key).expect("removed");
        assert!(!bench.authority("").exists() && !bench.daemon("").exists());
    }
}

#[test]
fn what_cannot_be_written_names_the_path() {
    let bench = bench();
    fs::write(bench.pki.daemon_directory(&bench.key), "a file in the way").expect("written");
    let error = bench.pki.write_daemon_files(&bench.key, &bench.names, NOW).expect_err("in the way");
    assert!(error.to_string().contains(bench.key.as_str()), "{error}");
}
