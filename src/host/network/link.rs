//! Removes a network interface, over rtnetlink(7).

use std::io;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType, recv, send, socket};

/// Removes the interface of this name; `false` when there is none.
pub(super) fn remove(name: &str) -> io::Result<bool> {
    let index = match std::fs::read_to_string(format!("/sys/class/net/{name}/ifindex")) {
        Ok(text) => text.trim().parse().map_err(io::Error::other)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    // No protocol named means `NETLINK_ROUTE`, which is number 0.
    let socket = socket(AddressFamily::NETLINK, SocketType::RAW, None)?;
    send(&socket, &removal(index), SendFlags::empty())?;
    let mut answer = [0; 1024];
    let (length, _) = recv(&socket, &mut answer, RecvFlags::empty())?;
    acknowledged(answer.get(..length).unwrap_or_default())?;
    Ok(true)
}

/// An `RTM_DELLINK` that asks for an answer: a header of 16 bytes, then `struct ifinfomsg`.
fn removal(index: u32) -> [u8; 32] {
    const RTM_DELLINK: u16 = 17;
    const NLM_F_REQUEST_ACK: u16 = 1 | 4;
    let mut request = [0; 32];
    request[0..4].copy_from_slice(&32_u32.to_ne_bytes());
    request[4..6].copy_from_slice(&RTM_DELLINK.to_ne_bytes());
    request[6..8].copy_from_slice(&NLM_F_REQUEST_ACK.to_ne_bytes());
    request[20..24].copy_from_slice(&index.to_ne_bytes());
    request
}

/// The answer is an `NLMSG_ERROR`, whose number after the header is 0 or a negated errno.
fn acknowledged(answer: &[u8]) -> io::Result<()> {
    let number = answer.get(16..20).and_then(|bytes| bytes.try_into().ok()).map(i32::from_ne_bytes);
    match number {
        Some(0) => Ok(()),
        Some(number) => Err(io::Error::from_raw_os_error(number.saturating_neg())),
        None => Err(io::Error::other("the kernel's answer is too short")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_goes_and_its_absence_is_no_error() {
        assert!(!remove("kilnnosuchlink").expect("looked"));
        let ip = |arguments: &[&str]| std::process::Command::new("ip").args(arguments).output();
        let made = ip(&["link", "add", "kilnunittest", "type", "veth", "peer", "name", "kilnunitpeer"]);
        if !made.is_ok_and(|output| output.status.success()) {
            eprintln!("skipped: cannot make a network interface here (needs root and iproute2)");
            return;
        }
        assert!(remove("kilnunittest").expect("removed"));
        assert!(!remove("kilnunittest").expect("looked"));
    }

    #[test]
    fn the_kernel_s_no_is_an_error() {
        let mut answer = [0; 36];
        assert!(acknowledged(&answer).is_ok());
        answer[16..20].copy_from_slice(&(-19_i32).to_ne_bytes());
        assert_eq!(acknowledged(&answer).expect_err("refused").raw_os_error(), Some(19));
        assert!(acknowledged(&[]).is_err());
    }
}
