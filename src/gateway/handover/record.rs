//! What is said of a connection that is handed over, as bytes. Version 1.
//!
//! A successor may be an older or a newer Kiln, and what comes may be anybody's: a record is bounded, read to its last
//! byte or refused, and says its version first.

use std::net::SocketAddr;
use std::time::Duration;

use kiln_domain::Key;
use thiserror::Error;

/// It goes up with each change that an older Kiln would misread.
pub(super) const VERSION: u8 = 1;

/// What a direction may carry: a full pipe, or the longest hello.
pub(super) const MOST_PENDING: usize = 512 * 1024;

/// Both directions, and what is fixed.
pub(super) const MOST_BYTES: usize = 2 * MOST_PENDING + 4096;

/// The descriptors that go with a record, in this order: the listener; the client; the client and the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Record {
    Listener,
    Waiting(Waiting),
    Relayed(Relayed),
    /// Nothing more comes.
    Complete,
    /// The successor has all of it, and every project is held.
    Holding,
    /// From here on they are the successor's.
    Yours,
}

/// It has not reached its daemon; what it has said is read again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Waiting {
    pub(crate) peer: SocketAddr,
    pub(crate) client: Option<SocketAddr>,
    pub(crate) age: Duration,
    /// A load balancer's header has been read.
    pub(crate) introduced: bool,
    /// Bytes from its first one on, or from after that header.
    pub(crate) read: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Relayed {
    pub(crate) peer: SocketAddr,
    pub(crate) client: Option<SocketAddr>,
    pub(crate) age: Duration,
    pub(crate) key: Key,
    pub(crate) to_daemon: Direction,
    pub(crate) to_client: Direction,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Direction {
    /// Bytes that have arrived.
    pub(crate) moved: u64,
    /// Its source has finished, and its sink knows.
    pub(crate) ended: bool,
    /// Read from the source and not yet taken by the sink.
    pub(crate) pending: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum RecordError {
    #[error("it is of version {0}, and this Kiln knows {VERSION}")]
    Version(u8),
    #[error("it is of kind {0}, which there is none of")]
    Kind(u8),
    #[error("it ends in the middle of {0}")]
    Short(&'static str),
    #[error("{0} bytes are left over")]
    Long(usize),
    #[error("{0} is none")]
    Wrong(&'static str),
}

impl Record {
    const fn kind(&self) -> u8 {
        match self {
            Self::Listener => 0,
            Self::Waiting(_) => 1,
            Self::Relayed(_) => 2,
            Self::Complete => 3,
            Self::Holding => 4,
            Self::Yours => 5,
        }
    }

    pub(crate) const fn descriptors(&self) -> usize {
        match self {
            Self::Listener | Self::Waiting(_) => 1,
            Self::Relayed(_) => 2,
            Self::Complete | Self::Holding | Self::Yours => 0,
        }
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![VERSION, self.kind()];
        match self {
            Self::Waiting(waiting) => {
                put_origin(&mut bytes, waiting.peer, waiting.client, waiting.age);
                bytes.push(u8::from(waiting.introduced));
                put(&mut bytes, &waiting.read);
            }
            Self::Relayed(relayed) => {
                put_origin(&mut bytes, relayed.peer, relayed.client, relayed.age);
                put(&mut bytes, relayed.key.as_str().as_bytes());
                for direction in [&relayed.to_daemon, &relayed.to_client] {
                    bytes.extend(direction.moved.to_be_bytes());
                    bytes.push(u8::from(direction.ended));
                    put(&mut bytes, &direction.pending);
                }
            }
            Self::Listener | Self::Complete | Self::Holding | Self::Yours => {}
        }
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self, RecordError> {
        let mut rest = Rest(bytes);
        match rest.byte("its version")? {
            VERSION => {}
            version => return Err(RecordError::Version(version)),
        }
        let record = match rest.byte("its kind")? {
            0 => Self::Listener,
            1 => {
                let (peer, client, age) = rest.origin()?;
                let introduced = rest.yes_or_no()?;
                Self::Waiting(Waiting { peer, client, age, introduced, read: rest.bytes("what was read")?.to_vec() })
            }
            2 => {
                let (peer, client, age) = rest.origin()?;
                let key = rest.text("the key")?.parse().map_err(|_| RecordError::Wrong("the key"))?;
                let (to_daemon, to_client) = (rest.direction()?, rest.direction()?);
                Self::Relayed(Relayed { peer, client, age, key, to_daemon, to_client })
            }
            3 => Self::Complete,
            4 => Self::Holding,
            5 => Self::Yours,
            kind => return Err(RecordError::Kind(kind)),
        };
        if rest.0.is_empty() { Ok(record) } else { Err(RecordError::Long(rest.0.len())) }
    }
}

fn put(bytes: &mut Vec<u8>, what: &[u8]) {
    // All that is put is bounded far below.
    bytes.extend(u32::try_from(what.len()).unwrap_or(u32::MAX).to_be_bytes());
    bytes.extend(what);
}

fn put_origin(bytes: &mut Vec<u8>, peer: SocketAddr, client: Option<SocketAddr>, age: Duration) {
    put(bytes, peer.to_string().as_bytes());
    put(bytes, client.map(|client| client.to_string()).unwrap_or_default().as_bytes());
    bytes.extend(u64::try_from(age.as_nanos()).unwrap_or(u64::MAX).to_be_bytes());
}

/// What has not been read of a record.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, count: usize, of: &'static str) -> Result<&'a [u8], RecordError> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(RecordError::Short(of))?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, of: &'static str) -> Result<[u8; N], RecordError> {
        self.take(N, of)?.try_into().map_err(|_| RecordError::Short(of))
    }

    fn byte(&mut self, of: &'static str) -> Result<u8, RecordError> {
        self.array::<1>(of).map(|[byte]| byte)
    }

    fn yes_or_no(&mut self) -> Result<bool, RecordError> {
        match self.byte("a yes or no")? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(RecordError::Wrong("a yes or no")),
        }
    }

    fn number(&mut self, of: &'static str) -> Result<u64, RecordError> {
        self.array(of).map(u64::from_be_bytes)
    }

    fn bytes(&mut self, of: &'static str) -> Result<&'a [u8], RecordError> {
        let length = usize::try_from(u32::from_be_bytes(self.array(of)?)).unwrap_or(usize::MAX);
        if length > MOST_PENDING { Err(RecordError::Wrong(of)) } else { self.take(length, of) }
    }

    fn text(&mut self, of: &'static str) -> Result<&'a str, RecordError> {
        std::str::from_utf8(self.bytes(of)?).map_err(|_| RecordError::Wrong(of))
    }

    fn origin(&mut self) -> Result<(SocketAddr, Option<SocketAddr>, Duration), RecordError> {
        let wrong = |_| RecordError::Wrong("an address");
        let peer = self.text("the peer's address")?.parse().map_err(wrong)?;
        let client = match self.text("the client's address")? {
            "" => None,
            client => Some(client.parse().map_err(wrong)?),
        };
        Ok((peer, client, Duration::from_nanos(self.number("the age")?)))
    }

    fn direction(&mut self) -> Result<Direction, RecordError> {
        let (moved, ended) = (self.number("the bytes moved")?, self.yes_or_no()?);
        let pending = self.bytes("what is pending")?.to_vec();
        // What has ended has nothing left to say.
        if ended && !pending.is_empty() {
            return Err(RecordError::Wrong("the end of a direction"));
        }
        Ok(Direction { moved, ended, pending })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn relayed() -> Record {
        Record::Relayed(Relayed {
            peer: "10.0.0.1:5".parse().expect("an address"),
            client: Some("[2001:db8::7]:9".parse().expect("an address")),
            age: Duration::from_millis(1_234_567),
            key: "pbcce5b6205652dd7".parse().expect("a key"),
            to_daemon: Direction { moved: 1 << 40, ended: true, pending: Vec::new() },
            to_client: Direction { moved: 7, ended: false, pending: b"half a frame".to_vec() },
        })
    }

    fn waiting() -> Record {
        let peer = "192.0.2.1:40000".parse().expect("an address");
        Record::Waiting(Waiting { peer, client: None, age: Duration::ZERO, introduced: false, read: vec![22, 3, 1] })
    }

    #[test]
    fn what_is_written_is_read_and_nothing_shorter_or_longer() {
        let plain = [Record::Listener, Record::Complete, Record::Holding, Record::Yours];
        for record in [relayed(), waiting()].into_iter().chain(plain) {
            let mut bytes = record.to_bytes();
            assert_eq!(Record::from_bytes(&bytes).as_ref(), Ok(&record));
            for end in 0..bytes.len() {
                let cut = Record::from_bytes(&bytes[..end]);
                assert!(matches!(cut, Err(RecordError::Short(_))), "{end} of {record:?}: {cut:?}");
            }
            bytes.push(0);
            assert_eq!(Record::from_bytes(&bytes), Err(RecordError::Long(1)));
            bytes[0] = VERSION + 1;
            assert_eq!(Record::from_bytes(&bytes), Err(RecordError::Version(VERSION + 1)));
        }
        assert_eq!(Record::from_bytes(&[VERSION, 6]), Err(RecordError::Kind(6)));
    }

    #[test]
    fn a_length_is_not_believed() {
        let mut bytes = waiting().to_bytes();
        let at = bytes.len() - 3 - 4;
        bytes[at..at + 4].copy_from_slice(&u32::MAX.to_be_bytes());
        assert_eq!(Record::from_bytes(&bytes), Err(RecordError::Wrong("what was read")));
    }

    proptest! {
        #[test]
        fn arbitrary_and_spoilt_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), at in 0_usize..150, value in any::<u8>()) {
            let _ = Record::from_bytes(&bytes);
            let mut spoilt = relayed().to_bytes();
            let length = spoilt.len();
            spoilt[at % length] = value;
            if let Ok(record) = Record::from_bytes(&spoilt) {
                prop_assert_eq!(Record::from_bytes(&record.to_bytes()), Ok(record));
            }
        }
    }
}
