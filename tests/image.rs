//! The container image, made for real and put into a private Incus. Slow the first time: the base root is made by
//! debootstrap and kept. Needs root, `KILN_TEST_INCUS` (see tests/incus.rs), `KILN_TEST_INIT` and `KILN_TEST_BUILDKITD`
//! (the static programs), and `KILN_TEST_CACHE` (a directory that is kept between runs).

use std::path::PathBuf;
use std::time::Instant;

use kiln::host::incus::IncusConfig;
use kiln::image::{ImageRequest, build};

fn path(variable: &str) -> Option<PathBuf> {
    let path = std::env::var_os(variable).map(PathBuf::from);
    if path.is_none() {
        eprintln!("skipped: an_image_is_made_once: {variable} is not set");
    }
    path
}

#[tokio::test]
async fn an_image_is_made_once() {
    let (Some(incus), Some(init), Some(buildkitd), Some(cache)) =
        (path("KILN_TEST_INCUS"), path("KILN_TEST_INIT"), path("KILN_TEST_BUILDKITD"), path("KILN_TEST_CACHE"))
    else {
        return;
    };
    let incus = IncusConfig::new(incus.join("unix.socket"), "kiln".to_owned());
    let mut request = ImageRequest { init, buildkitd, base: None, cache, refresh: false, incus };
    let begun = Instant::now();
    let first = build(&request, |line| eprintln!("{line}")).await.expect("an image");
    eprintln!("first {:?}, {} MB", begun.elapsed(), first.bytes / 1_000_000);
    let begun = Instant::now();
    let second = build(&request, |line| eprintln!("{line}")).await.expect("an image");
    eprintln!("second {:?}", begun.elapsed());
    assert_eq!(first.fingerprint, second.fingerprint, "equal parts, different images");
    assert!(second.known, "it was given to Incus twice");

    request.init = PathBuf::from("/nonexistent/kiln-init");
    let error = build(&request, |_| {}).await.expect_err("there is no such program").to_string();
    assert!(error.contains("/nonexistent/kiln-init"), "{error}");
}
