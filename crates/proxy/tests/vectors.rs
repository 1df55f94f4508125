//! What a reader of PROXY headers must say to bytes from outside.

use std::net::SocketAddr;

use kiln_proxy::{Header, MAX_BYTES, Progress, ProxyError, read};
use proptest::prelude::*;

const SIGNATURE: &[u8; 12] = b"\r\n\r\n\0\r\nQUIT\n";

fn v2(command: u8, family: u8, rest: &[u8]) -> Vec<u8> {
    let length = u16::try_from(rest.len()).expect("fits").to_be_bytes();
    [&SIGNATURE[..], &[command, family], &length, rest].concat()
}

fn address(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

/// The header at the front of `bytes` with something behind it, whichever way it is cut.
#[track_caller]
fn header(bytes: &[u8]) -> Option<SocketAddr> {
    for end in 0..bytes.len() {
        assert_eq!(read(&bytes[..end]), Ok(Progress::NeedMore), "after {end} bytes");
    }
    let followed = [bytes, b"\x16\x03\x01PROXY \r\n"].concat();
    match read(&followed) {
        Ok(Progress::Header(Header { from, length })) => {
            assert_eq!(length, bytes.len(), "what follows it is not its own");
            from
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn version_1() {
    assert_eq!(header(b"PROXY TCP4 192.0.2.7 198.51.100.1 40000 1234\r\n"), Some(address("192.0.2.7:40000")));
    assert_eq!(header(b"PROXY TCP6 2001:db8::7 2001:db8::1 1 65535\r\n"), Some(address("[2001:db8::7]:1")));
    assert_eq!(
        header(b"PROXY TCP6 ::ffff:192.0.2.7 ::1 9 9\r\n"),
        Some(address("192.0.2.7:9")),
        "one client, one name"
    );
    assert_eq!(header(b"PROXY UNKNOWN\r\n"), None);
    assert_eq!(header(b"PROXY UNKNOWN ffff:f...f whatever\r\n"), None);
}

#[test]
fn version_2() {
    let v4 = [&[192, 0, 2, 7, 198, 51, 100, 1][..], &40000_u16.to_be_bytes(), &1234_u16.to_be_bytes()].concat();
    assert_eq!(header(&v2(0x21, 0x11, &v4)), Some(address("192.0.2.7:40000")));
    let v6: Vec<u8> =
        [0x20, 1, 0x0d, 0xb8].into_iter().chain([0; 11]).chain([7]).chain([0; 16]).chain([0, 9, 4, 2]).collect();
    assert_eq!(header(&v2(0x21, 0x21, &v6)), Some(address("[2001:db8::7]:9")));
    let more = [&v4[..], &[0xea, 0, 3, 1, 2, 3], &vec![4; 500]].concat();
    assert_eq!(header(&v2(0x21, 0x11, &more)), Some(address("192.0.2.7:40000")), "TLVs are skipped");
    assert_eq!(header(&v2(0x20, 0x00, &[])), None, "a health check");
    assert_eq!(header(&v2(0x20, 0x11, &v4)), None, "a health check has no client, whatever it says");
    assert_eq!(header(&v2(0x21, 0x00, b"xyz")), None);
    assert_eq!(header(&v2(0x21, 0x31, &[b'/'; 216])), None, "a unix socket");
    let full = [&v4[..], &vec![0; MAX_BYTES - 16 - 12]].concat();
    assert_eq!(header(&v2(0x21, 0x11, &full)), Some(address("192.0.2.7:40000")));
}

#[test]
fn what_is_none_is_refused_at_its_first_wrong_byte() {
    for bytes in
        [&b"\x16"[..], b"G", b"PR0", b"PROXY\t", b"proxy ", b"\r\n\r\n\r", b"\r\n\r\n\0\r\nQUIT\r", b"SSH-2.0-x"]
    {
        assert_eq!(read(bytes), Err(ProxyError::NotProxy), "{:?}", bytes.escape_ascii().to_string());
    }
}

#[test]
fn odd_headers_are_refused() {
    for line in [
        "PROXY \r\n",
        "PROXY TCP4\r\n",
        "PROXY TCP4 192.0.2.7 198.51.100.1 40000\r\n",
        "PROXY TCP4 192.0.2.7 198.51.100.1 40000 1234 5\r\n",
        "PROXY TCP4 192.0.2.7  198.51.100.1 40000 1234\r\n",
        "PROXY TCP4 192.0.2.7 198.51.100.1 40000 1234 \r\n",
        "PROXY TCP4 192.0.2.07 198.51.100.1 40000 1234\r\n",
        "PROXY TCP4 192.0.2.256 198.51.100.1 40000 1234\r\n",
        "PROXY TCP4 192.0.2.7 198.51.100.1 65536 1234\r\n",
        "PROXY TCP4 192.0.2.7 198.51.100.1 +1 1234\r\n",
        "PROXY TCP4 192.0.2.7 198.51.100.1 01 1234\r\n",
        "PROXY TCP4 192.0.2.7 198.51.100.1 1 \r\n",
        "PROXY TCP4 2001:db8::7 2001:db8::1 1 2\r\n",
        "PROXY TCP6 192.0.2.7 198.51.100.1 1 2\r\n",
        "PROXY TCP4 0.0.0.0 198.51.100.1 1 2\r\n",
        "PROXY UDP4 192.0.2.7 198.51.100.1 1 2\r\n",
        "PROXY tcp4 192.0.2.7 198.51.100.1 1 2\r\n",
        "PROXY UNKNOWNS\r\n",
        "PROXY TCP4 192.0.2.7\0 198.51.100.1 1 2\r\n",
        "PROXY TCP4 192.0.2.7\n198.51.100.1 1 2\r\n",
    ] {
        assert!(
            matches!(read(line.as_bytes()), Err(ProxyError::Malformed(_))),
            "{line:?}: {:?}",
            read(line.as_bytes())
        );
    }
    assert!(matches!(read(b"PROXY TCP4 \xff\r\n"), Err(ProxyError::Malformed(_))));
    let endless = [b"PROXY UNKNOWN ".to_vec(), vec![b'x'; 200]].concat();
    assert_eq!(read(&endless[..106]), Ok(Progress::NeedMore));
    assert_eq!(read(&endless[..107]), Err(ProxyError::TooLong(107)));
    for (command, family, rest) in [
        (0x11, 0x11, 12),
        (0x31, 0x11, 12),
        (0x22, 0x11, 12),
        (0x21, 0x12, 12),
        (0x21, 0x22, 36),
        (0x21, 0x41, 36),
        (0x21, 0x11, 11),
        (0x21, 0x21, 35),
        (0x21, 0x11, 12),
    ] {
        let bytes = v2(command, family, &vec![0; rest]);
        assert!(
            matches!(read(&bytes), Err(ProxyError::Malformed(_))),
            "{command:x} {family:x} {rest}: {:?}",
            read(&bytes)
        );
    }
    let long = v2(0x21, 0x11, &vec![1; MAX_BYTES]);
    assert_eq!(read(&long[..16]), Err(ProxyError::TooLong(MAX_BYTES)), "at its length, before anything of it has come");
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic_and_an_answer_stays(start in 0_usize..3, bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let front: &[u8] = match start { 0 => b"", 1 => b"PROXY ", _ => SIGNATURE };
        let bytes = [front, &bytes].concat();
        let mut answer = Ok(Progress::NeedMore);
        for end in 0..=bytes.len() {
            let now = read(&bytes[..end]);
            if answer != Ok(Progress::NeedMore) {
                prop_assert_eq!(&now, &answer, "more bytes changed the answer");
            }
            answer = now;
        }
    }
}
