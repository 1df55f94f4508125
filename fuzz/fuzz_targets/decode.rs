//! Any bytes as a request's body: what is accepted is within the limits, is written and read back alike, and nothing
//! panics.
#![no_main]

use kiln_wire::{CompleteRequest, MAX_BODY_BYTES, Rollback, RouteRequest, check_branch, decode};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|body: &[u8]| {
    if let Ok(request) = decode::<RouteRequest>(body) {
        assert!(body.len() <= MAX_BODY_BYTES);
        read_back(&request);
        // Its judgement must not panic either; most of what is decoded is refused here.
        let _ = request.spec();
        let _ = request.branch.as_deref().map(check_branch);
    }
    if let Ok(request) = decode::<CompleteRequest>(body) {
        assert!(body.len() <= MAX_BODY_BYTES);
        read_back(&request);
        let _ = request.key.parse::<kiln_domain::Key>();
    }
    if let Ok(request) = decode::<Rollback>(body) {
        assert!(body.len() <= MAX_BODY_BYTES);
        read_back(&request);
        let named = request.snapshot.as_deref().map(str::parse::<kiln_domain::SnapshotName>);
        if let Some(Ok(name)) = named {
            assert!(name.to_string().parse() == Ok(name), "one name is one snapshot");
        }
    }
});

fn read_back<T>(request: &T)
where
    T: serde::Serialize + serde::de::DeserializeOwned + PartialEq,
{
    let text = serde_json::to_vec(request).expect("a request is JSON");
    // Escapes can make it longer than it was.
    if text.len() <= MAX_BODY_BYTES {
        assert!(decode::<T>(&text).expect("our own JSON") == *request, "read back as another");
    }
}
