//! Lists the interfaces and addresses of the network namespace that the calling thread is in, over rtnetlink(7).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType, recv, send, socket};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) index: u32,
    pub(super) name: String,
    pub(super) loopback: bool,
    /// The interface that it is the other end of, or lies on.
    pub(super) peer: Option<u32>,
    /// In which other namespace that is, as a number that this namespace has given it.
    pub(super) peer_namespace: Option<u32>,
    /// `veth`, `bridge`, …; hardware has none.
    pub(super) kind: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Address {
    /// Of its interface.
    pub(super) index: u32,
    pub(super) ip: IpAddr,
}

const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const RTM_GETADDR: u16 = 22;
const IFLA_IFNAME: u16 = 3;
const IFLA_LINK: u16 = 5;
const IFLA_LINKINFO: u16 = 18;
const IFLA_LINK_NETNSID: u16 = 37;
const IFLA_INFO_KIND: u16 = 1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFF_LOOPBACK: u32 = 0x8;

pub(super) fn links() -> io::Result<Vec<Link>> {
    let messages = dump(RTM_GETLINK, RTM_NEWLINK)?;
    Ok(messages.iter().filter_map(|message| link(message)).collect())
}

pub(super) fn addresses() -> io::Result<Vec<Address>> {
    let messages = dump(RTM_GETADDR, RTM_NEWADDR)?;
    Ok(messages.iter().filter_map(|message| address(message)).collect())
}

/// A message that begins with `struct ifinfomsg`: family, type, index, flags, change.
fn link(message: &[u8]) -> Option<Link> {
    let attributes = message.get(16..)?;
    let linkinfo = attribute(attributes, IFLA_LINKINFO).unwrap_or_default();
    Some(Link {
        index: number(message, 4)?,
        name: text(attribute(attributes, IFLA_IFNAME)?),
        loopback: number(message, 8)? & IFF_LOOPBACK != 0,
        peer: attribute(attributes, IFLA_LINK).and_then(|value| number(value, 0)),
        peer_namespace: attribute(attributes, IFLA_LINK_NETNSID).and_then(|value| number(value, 0)),
        kind: attribute(linkinfo, IFLA_INFO_KIND).map(text),
    })
}

/// A message that begins with `struct ifaddrmsg`: family, length, flags, scope, index.
fn address(message: &[u8]) -> Option<Address> {
    let attributes = message.get(8..)?;
    // On a point-to-point interface the other attribute is the peer's.
    let value = attribute(attributes, IFA_LOCAL).or_else(|| attribute(attributes, IFA_ADDRESS))?;
    let ip = if let Ok(octets) = <[u8; 4]>::try_from(value) {
        Ipv4Addr::from(octets).into()
    } else {
        Ipv6Addr::from(<[u8; 16]>::try_from(value).ok()?).into()
    };
    Some(Address { index: number(message, 4)?, ip })
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned()
}

/// The value of the first attribute of this kind in a sequence: each has its length, its kind, its value, and is padded
/// to four bytes.
fn attribute(mut rest: &[u8], wanted: u16) -> Option<&[u8]> {
    /// The two highest bits are flags.
    const KIND: u16 = 0x3fff;
    loop {
        let length = usize::from(u16::from_ne_bytes(rest.get(0..2)?.try_into().ok()?));
        let kind = u16::from_ne_bytes(rest.get(2..4)?.try_into().ok()?) & KIND;
        let value = rest.get(4..length)?;
        if kind == wanted {
            return Some(value);
        }
        rest = rest.get(length.next_multiple_of(4)..)?;
    }
}

/// The bodies of all messages of the kind `answer` that a dump is answered with.
fn dump(request: u16, answer: u16) -> io::Result<Vec<Vec<u8>>> {
    const NLMSG_ERROR: u16 = 2;
    const NLMSG_DONE: u16 = 3;
    // More than the kernel puts into one piece.
    const LARGEST: usize = 64 << 10;
    let socket = socket(AddressFamily::NETLINK, SocketType::RAW, None)?;
    send(&socket, &dump_request(request), SendFlags::empty())?;
    let mut buffer = vec![0; LARGEST];
    let mut bodies = Vec::new();
    loop {
        let (length, _) = recv(&socket, &mut *buffer, RecvFlags::empty())?;
        let mut rest = buffer.get(..length).unwrap_or_default();
        while !rest.is_empty() {
            let short = || io::Error::other("the kernel's answer is cut short");
            let length = number(rest, 0).and_then(|length| usize::try_from(length).ok()).ok_or_else(short)?;
            let kind = rest.get(4..6).and_then(|kind| kind.try_into().ok()).map(u16::from_ne_bytes);
            let body = rest.get(16..length).ok_or_else(short)?;
            match kind {
                Some(NLMSG_DONE) => return Ok(bodies),
                Some(NLMSG_ERROR) => {
                    let code = number(body, 0).ok_or_else(short)?.cast_signed();
                    return Err(io::Error::from_raw_os_error(code.saturating_neg()));
                }
                Some(kind) if kind == answer => bodies.push(body.to_vec()),
                _ => {}
            }
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
    }
}

/// A header of 16 bytes, then as many zeroes as the longest of the bodies: every family, every interface.
fn dump_request(kind: u16) -> [u8; 32] {
    const NLM_F_REQUEST_DUMP: u16 = 1 | 0x300;
    let mut request = [0; 32];
    request[0..4].copy_from_slice(&32_u32.to_ne_bytes());
    request[4..6].copy_from_slice(&kind.to_ne_bytes());
    request[6..8].copy_from_slice(&NLM_F_REQUEST_DUMP.to_ne_bytes());
    request
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_is_found_with_its_address() {
        let links = links().expect("listed");
        let lo = links.iter().find(|link| link.name == "lo").expect("there is one");
        assert!(lo.loopback && lo.peer_namespace.is_none() && lo.kind.is_none(), "{lo:?}");
        let addresses = addresses().expect("listed");
        let local = Address { index: lo.index, ip: Ipv4Addr::LOCALHOST.into() };
        assert!(addresses.contains(&local), "{addresses:?}");
    }

    #[test]
    fn what_is_cut_short_is_nothing() {
        let mut message = vec![0; 16];
        message.extend([8, 0, 3, 0, b'a', b'b', 0, 0]);
        assert_eq!(link(&message).expect("whole").name, "ab");
        for length in 0..message.len() {
            assert_eq!(link(&message[..length]), None, "of {length} bytes");
        }
        // A length that leads nowhere.
        for length in [0, 1, 3, 255] {
            message[16] = length;
            assert_eq!(link(&message), None, "an attribute of {length} bytes");
        }
    }
}
