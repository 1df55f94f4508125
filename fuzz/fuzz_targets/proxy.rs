//! Any bytes where a load balancer's PROXY header should stand: an answer stays whatever comes after it, and says no more
//! bytes than there were.
#![no_main]

use kiln_proxy::{MAX_BYTES, Progress, read};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let bytes = &bytes[..bytes.len().min(MAX_BYTES + 16)];
    let mut answer = Ok(Progress::NeedMore);
    // Each prefix where something can change, and then by larger steps.
    for end in (0..bytes.len().min(256)).chain((256..bytes.len()).step_by(61)).chain([bytes.len()]) {
        let now = read(&bytes[..end]);
        if answer != Ok(Progress::NeedMore) {
            assert_eq!(now, answer, "more bytes changed the answer");
        }
        if let Ok(Progress::Header(header)) = &now {
            assert!(header.length <= end, "it counts bytes that have not come");
        }
        answer = now;
    }
    assert!(bytes.len() < MAX_BYTES || answer != Ok(Progress::NeedMore), "it wants more than it may");
});
