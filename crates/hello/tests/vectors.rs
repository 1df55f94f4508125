//! What a hello reader must say to bytes from outside: the reference's vectors, a real client's hellos, hostile ones.

use std::sync::Arc;

use kiln_hello::{Alert, Hello, HelloError, HelloReader, MAX_BYTES, Progress};
use proptest::prelude::*;
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore};

const NAME: &str = "buildkitd-p1a2b3c4d5e6f7a8.builds.example.com";

/// A ClientHello of `extensions` (already encoded, without the length in front), as a handshake message.
fn message(extensions: &[u8]) -> Vec<u8> {
    let mut body = vec![3, 3];
    body.extend([7; 32]);
    body.extend([0, 0, 2, 0x13, 0x01, 1, 0]);
    body.extend(u16::try_from(extensions.len()).expect("fits").to_be_bytes());
    body.extend(extensions);
    let length = u32::try_from(body.len()).expect("fits").to_be_bytes();
    [&[1], &length[1..], &body].concat()
}

fn extension(kind: u16, body: &[u8]) -> Vec<u8> {
    [&kind.to_be_bytes()[..], &u16::try_from(body.len()).expect("fits").to_be_bytes(), body].concat()
}

fn server_name_of(kind: u8, name: &[u8]) -> Vec<u8> {
    let length = u16::try_from(name.len()).expect("fits");
    let entry = [&[kind][..], &length.to_be_bytes(), name].concat();
    let list = u16::try_from(entry.len()).expect("fits");
    extension(0, &[&list.to_be_bytes()[..], &entry].concat())
}

/// `signature_algorithms`: `ecdsa_secp256r1_sha256`.
fn signatures() -> Vec<u8> {
    extension(13, &[0, 2, 4, 3])
}

fn named(name: &[u8]) -> Vec<u8> {
    message(&[server_name_of(0, name), signatures()].concat())
}

/// Cuts a message into records of at most `size` bytes.
fn records(message: &[u8], size: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for piece in message.chunks(size) {
        bytes.extend([22, 3, 1]);
        bytes.extend(u16::try_from(piece.len()).expect("fits").to_be_bytes());
        bytes.extend(piece);
    }
    bytes
}

fn read(bytes: &[u8]) -> Result<Progress, HelloError> {
    HelloReader::new().feed(bytes)
}

fn name_in(bytes: &[u8]) -> Option<String> {
    match read(bytes) {
        Ok(Progress::Hello(hello)) => hello.server_name,
        other => panic!("{other:?}"),
    }
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).expect("hex")).collect()
}

/// What rustls itself sends; with a post-quantum key share it does not fit into one Ethernet frame.
fn real_hello(name: &str) -> Vec<u8> {
    let provider = aws_lc_rs::default_provider();
    let groups = [&[aws_lc_rs::kx_group::X25519MLKEM768][..], &provider.kx_groups].concat();
    let provider = CryptoProvider { kx_groups: groups, ..provider };
    let config = ClientConfig::builder_with_provider(Arc::new(provider))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    let name = ServerName::try_from(name.to_owned()).expect("a name");
    let mut connection = ClientConnection::new(Arc::new(config), name).expect("a connection");
    let mut bytes = Vec::new();
    connection.write_tls(&mut bytes).expect("written to memory");
    bytes
}

#[test]
fn vectors_of_the_reference() {
    let named = unhex(
        "1603010065010000610303000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f0000021301010000\
         3600000032003000002d6275696c646b6974642d703161326233633464356536663761382e6275696c64732e6578616d706c652e636f6d",
    );
    assert_eq!(name_in(&named).as_deref(), Some(NAME));
    for nameless in [
        "160301002f0100002b0303000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f000002130101000000",
        "160301002d010000290303000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f00000213010100",
    ] {
        assert_eq!(name_in(&unhex(nameless)), None);
    }
    assert_eq!(read(&unhex("1603010000")), Err(HelloError::RecordLength(0)));
    assert_eq!(read(&unhex("1603014801")), Err(HelloError::RecordLength(18433)));
    assert_eq!(read(&unhex("1603014800")), Ok(Progress::NeedMore));
    assert_eq!(read(&unhex("160301000402000000")), Err(HelloError::NotClientHello(2)));
    assert!(matches!(read(&records(&unhex("010000020303"), 99)), Err(HelloError::Malformed(_))));
}

#[test]
fn a_name_is_found_wherever_it_stands() {
    assert_eq!(name_in(&records(&named(NAME.as_bytes()), 9999)).as_deref(), Some(NAME));
    let last = message(&[signatures(), extension(0xfafa, &[1, 2]), server_name_of(0, NAME.as_bytes())].concat());
    assert_eq!(name_in(&records(&last, 9999)).as_deref(), Some(NAME));
    let shouted = named(NAME.to_uppercase().as_bytes());
    assert_eq!(name_in(&records(&shouted, 9999)).as_deref(), Some(NAME));
}

#[test]
fn one_trailing_dot_is_dropped() {
    assert_eq!(name_in(&records(&named(format!("{NAME}.").as_bytes()), 9999)).as_deref(), Some(NAME));
    let two = read(&records(&named(format!("{NAME}..").as_bytes()), 9999));
    assert!(matches!(two, Err(HelloError::Malformed(_))), "{two:?}");
}

#[test]
fn values_that_mean_nothing_change_nothing() {
    // GREASE (RFC 8701), as browsers send it: a cipher, the first and the last extension, a group and a version.
    let lists = [extension(10, &[0, 4, 0x3a, 0x3a, 0, 29]), extension(43, &[4, 0x5a, 0x5a, 3, 4])].concat();
    let body = [
        &extension(0x1a1a, &[])[..],
        &server_name_of(0, NAME.as_bytes()),
        &lists,
        &signatures(),
        &extension(0xaaaa, &[0]),
    ]
    .concat();
    let mut hello = message(&body);
    // The one cipher suite that `message` offers.
    hello.splice(4 + 2 + 32 + 1..4 + 2 + 32 + 1 + 4, [0, 4, 0x2a, 0x2a, 0x13, 0x01]);
    let length = u32::try_from(hello.len() - 4).expect("fits").to_be_bytes();
    hello[1..4].copy_from_slice(&length[1..]);
    assert_eq!(name_in(&records(&hello, 9999)).as_deref(), Some(NAME));
}

#[test]
fn an_encrypted_hello_is_routed_by_its_outer_name() {
    // Encrypted Client Hello, outer: HKDF-SHA256 with AES-128-GCM, a configuration, a key and a payload.
    let sealed = [&[0, 0, 1, 0, 1, 7, 0, 32][..], &[9; 32], &[0, 144], &[5; 144]].concat();
    for ech in [extension(0xfe0d, &sealed), extension(0xfe0d, &[1])] {
        let hello = message(&[&ech[..], &server_name_of(0, NAME.as_bytes()), &signatures()].concat());
        assert_eq!(name_in(&records(&hello, 9999)).as_deref(), Some(NAME));
    }
}

#[test]
fn a_large_hello_is_read_however_it_is_cut() {
    let filler = extension(21, &vec![0; 40_000]);
    let hello = message(&[filler, signatures(), server_name_of(0, NAME.as_bytes())].concat());
    for record in [16_384, 18_432, 1_000, 64, 9] {
        let bytes = records(&hello, record);
        assert!(record < 64 || bytes.len() < MAX_BYTES);
        for segment in [1, 1_460, bytes.len()] {
            let mut reader = HelloReader::new();
            let answers = bytes.chunks(segment).map(|piece| reader.feed(piece)).collect::<Vec<_>>();
            let expected = match bytes.len() {
                ..=MAX_BYTES => Ok(Progress::Hello(Hello { server_name: Some(NAME.to_owned()) })),
                _ => Err(HelloError::TooLarge),
            };
            assert_eq!(answers.last(), Some(&expected), "records of {record}, segments of {segment}");
        }
    }
}

#[test]
fn no_name_is_no_name() {
    assert_eq!(name_in(&records(&message(&signatures()), 9999)), None);
    for address in ["10.88.0.1", "::1"] {
        let bytes = records(&named(address.as_bytes()), 9999);
        assert!(!matches!(read(&bytes), Ok(Progress::Hello(Hello { server_name: Some(_) }))), "{address} was a name");
    }
}

#[test]
fn names_that_are_none_are_refused() {
    let long = ["a".repeat(60).as_str(); 5].join(".");
    assert!(long.len() > 300);
    let nul = b"buildkitd-p1a2b3c4d5e6f7a8\0.builds.example.com";
    for name in [&b""[..], nul, "b\u{fc}ildkitd.example.com".as_bytes(), &[0xff, 0xfe], long.as_bytes(), b"a b", b".."]
    {
        let outcome = read(&records(&named(name), 9999));
        assert!(
            matches!(outcome, Err(HelloError::Malformed(_))),
            "{:?} gave {outcome:?}",
            name.escape_ascii().to_string()
        );
    }
    let other_kind = records(&message(&[server_name_of(1, NAME.as_bytes()), signatures()].concat()), 9999);
    assert!(!matches!(read(&other_kind), Ok(Progress::Hello(Hello { server_name: Some(_) }))));
}

#[test]
fn what_is_not_tls_is_known_by_its_first_bytes() {
    for bytes in
        [&b"GET / HTTP/1.1\r\n"[..], b"SSH-2.0-OpenSSH_9.2\r\n", b"PRI * HTTP/2.0", &[0x80, 0x2e, 1, 3, 1], &[22, 2]]
    {
        let error = read(bytes).expect_err("not TLS");
        assert!(matches!(error, HelloError::NotTls(_)), "{error:?}");
        assert_eq!(error.alert(), Alert::UnexpectedMessage);
    }
    assert!(matches!(read(b"G"), Err(HelloError::NotTls(_))), "one byte is enough");
    assert_eq!(read(b""), Ok(Progress::NeedMore));
}

#[test]
fn another_record_type_in_the_middle_is_refused() {
    let mut bytes = records(&named(NAME.as_bytes())[..20], 99);
    bytes.extend(Alert::InternalError.to_bytes());
    assert!(matches!(read(&bytes), Err(HelloError::NotTls(_))));
}

#[test]
fn a_real_post_quantum_hello_is_read_and_replayed() {
    let bytes = real_hello(NAME);
    assert!(bytes.len() > 1460, "it fits into one segment: {}", bytes.len());
    let mut reader = HelloReader::new();
    for byte in &bytes[..bytes.len() - 1] {
        assert_eq!(reader.feed(&[*byte]), Ok(Progress::NeedMore));
    }
    let hello = Hello { server_name: Some(NAME.to_owned()) };
    assert_eq!(reader.feed(&[bytes[bytes.len() - 1], 20, 3, 3]), Ok(Progress::Hello(hello)));
    assert_eq!(reader.feed(b"early data"), Ok(Progress::NeedMore));
    assert_eq!(reader.into_bytes(), [&bytes[..], &[20, 3, 3], b"early data"].concat());
}

#[test]
fn one_byte_per_record_routes() {
    let bytes = real_hello(NAME);
    assert_eq!(name_in(&records(&bytes[5..], 1)).as_deref(), Some(NAME));
}

#[test]
fn a_hello_padded_to_the_limit_is_read_and_a_larger_one_refused() {
    let padded = |padding: usize| {
        let filler = extension(21, &vec![0; padding]);
        records(&message(&[server_name_of(0, NAME.as_bytes()), signatures(), filler].concat()), 16384)
    };
    let largest = padded(65_300);
    assert!(largest.len() > MAX_BYTES - 200 && largest.len() <= MAX_BYTES, "{}", largest.len());
    assert_eq!(name_in(&largest).as_deref(), Some(NAME));
    // Announced too large: refused at its header, before anything of it has come.
    assert_eq!(read(&[22, 3, 1, 0x40, 0, 1, 1, 0, 0]), Err(HelloError::TooLarge));
    assert_eq!(read(&[22, 3, 1, 0x40, 0, 1, 0xff, 0xff, 0xff]), Err(HelloError::TooLarge));
}

#[test]
fn record_headers_count_against_the_limit() {
    let filler = extension(21, &vec![0; 20_000]);
    let bytes = records(&message(&[server_name_of(0, NAME.as_bytes()), signatures(), filler].concat()), 1);
    let mut reader = HelloReader::new();
    let mut outcome = Ok(Progress::NeedMore);
    for piece in bytes.chunks(1000) {
        outcome = reader.feed(piece);
        if outcome.is_err() {
            break;
        }
    }
    assert_eq!(outcome, Err(HelloError::TooLarge));
    assert!(reader.bytes().len() <= MAX_BYTES + 1000);
    assert_eq!(reader.feed(b"more"), Err(HelloError::TooLarge), "an error is final");
}

proptest! {
    #[test]
    fn the_name_does_not_depend_on_how_the_bytes_are_cut(record in 1_usize..2000, cuts in prop::collection::vec(1_usize..400, 1..60)) {
        let hello = real_hello(NAME);
        let bytes = records(&hello[5..], record);
        let mut reader = HelloReader::new();
        let mut rest = &bytes[..];
        let mut answer = Progress::NeedMore;
        for cut in cuts.iter().cycle() {
            let (piece, tail) = rest.split_at((*cut).min(rest.len()));
            rest = tail;
            answer = reader.feed(piece).expect("a good hello");
            if rest.is_empty() {
                break;
            }
            prop_assert_eq!(&answer, &Progress::NeedMore);
        }
        prop_assert_eq!(answer, Progress::Hello(Hello { server_name: Some(NAME.to_owned()) }));
        prop_assert_eq!(reader.bytes(), &bytes[..]);
    }

    #[test]
    fn arbitrary_bytes_never_panic(pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..20)) {
        let mut reader = HelloReader::new();
        for piece in &pieces {
            let _ = reader.feed(piece);
        }
        prop_assert_eq!(reader.into_bytes(), pieces.concat());
    }

    #[test]
    fn a_spoilt_hello_never_panics(at in 0_usize..1400, value in any::<u8>(), length in 0_usize..1500) {
        let mut bytes = real_hello(NAME);
        if let Some(byte) = bytes.get_mut(at) {
            *byte = value;
        }
        bytes.truncate(length);
        let _ = read(&bytes);
    }

    #[test]
    fn arbitrary_extensions_never_panic(extensions in prop::collection::vec(any::<u8>(), 0..600), record in 1_usize..700) {
        let _ = read(&records(&message(&extensions), record));
    }
}
