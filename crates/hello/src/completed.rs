//! A hello with an extension that it lacks, so that rustls reads it to its end. Only ever judged, never sent.

const MESSAGE_HEADER: usize = 4;
const VERSION_AND_RANDOM: usize = 2 + 32;

/// `signature_algorithms`, with one.
const SIGNATURE_ALGORITHMS: [u8; 8] = [0, 13, 0, 4, 0, 2, 4, 3];

/// `None`: the message has no extensions to add one to (and so no name), or no room. rustls has found it well-formed.
pub(crate) fn with_signature_algorithms(message: &[u8]) -> Option<Vec<u8>> {
    let mut at = MESSAGE_HEADER + VERSION_AND_RANDOM;
    // Session, cipher suites, compression methods: each behind its length.
    for size in [1, 2, 1] {
        at += size + length(message, at, size)?;
    }
    let extensions = length(message, at, 2)?;
    let longer = u16::try_from(extensions + SIGNATURE_ALGORITHMS.len()).ok()?;
    let whole = u32::try_from(message.len() - MESSAGE_HEADER + SIGNATURE_ALGORITHMS.len()).ok()?;
    let mut completed = message.to_vec();
    completed.extend(SIGNATURE_ALGORITHMS);
    completed.get_mut(at..at + 2)?.copy_from_slice(&longer.to_be_bytes());
    completed.get_mut(1..MESSAGE_HEADER)?.copy_from_slice(whole.to_be_bytes().get(1..)?);
    Some(completed)
}

/// A number of so many bytes.
fn length(message: &[u8], at: usize, size: usize) -> Option<usize> {
    let bytes = message.get(at..at + size)?;
    Some(bytes.iter().fold(0, |number, byte| number * 0x100 + usize::from(*byte)))
}
