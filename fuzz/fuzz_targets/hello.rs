//! Any bytes as a connection's first: the answer does not depend on how they were cut, every byte is kept, an error is
//! final, and a name is a lower-case DNS name.
#![no_main]

use std::mem::discriminant;

use kiln_hello::{HelloError, HelloReader, MAX_BYTES, Progress};
use libfuzzer_sys::fuzz_target;

/// What is said in the end, and after how many bytes: `None` if they are not enough to tell.
fn answer(bytes: &[u8], sizes: impl Fn(usize) -> usize) -> Option<Result<Progress, HelloError>> {
    let mut reader = HelloReader::new();
    let (mut rest, mut turn) = (bytes, 0);
    let mut said = None;
    while !rest.is_empty() {
        let (now, later) = rest.split_at(sizes(turn).clamp(1, rest.len()));
        (rest, turn) = (later, turn + 1);
        match reader.feed(now) {
            Ok(Progress::NeedMore) => {}
            other => {
                said = Some(other);
                break;
            }
        }
    }
    if let Some(Err(error)) = &said {
        assert_eq!(reader.feed(&[0x16]).as_ref(), Err(error), "an error is final");
    }
    let fed = bytes.len() - rest.len();
    assert_eq!(&reader.into_bytes()[..fed], &bytes[..fed], "a byte was lost");
    said
}

fuzz_target!(|input: &[u8]| {
    // The first byte says how the rest is cut.
    let Some((&cut, bytes)) = input.split_first() else { return };
    let bytes = &bytes[..bytes.len().min(MAX_BYTES + 16)];
    let whole = answer(bytes, |_| usize::MAX);
    let pieces = answer(bytes, |turn| 1 + (turn * 7 + usize::from(cut)) % (1 + usize::from(cut)));
    match (&whole, &pieces) {
        // The words of an error may show as many bytes as there were; what it is may not change.
        (Some(Err(a)), Some(Err(b))) => assert_eq!(discriminant(a), discriminant(b), "{a} or {b}"),
        _ => assert_eq!(whole, pieces, "cutting changed the answer"),
    }
    if let Some(Ok(Progress::Hello(hello))) = whole
        && let Some(name) = hello.server_name
    {
        assert!(name.len() <= 253 && name == name.to_ascii_lowercase(), "{name}");
    }
});
