//! The alerts that a refused client gets.

/// Numbers of RFC 8446 section 6 and RFC 6066 section 3.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Alert {
    UnexpectedMessage = 10,
    RecordOverflow = 22,
    HandshakeFailure = 40,
    DecodeError = 50,
    InternalError = 80,
    UnrecognizedName = 112,
}

impl Alert {
    /// A fatal alert as a whole TLS record. Before any key exists alerts are sent in the clear, so whoever has read the
    /// hello can write one.
    pub const fn to_bytes(self) -> [u8; 7] {
        const ALERT: u8 = 21;
        const FATAL: u8 = 2;
        [ALERT, 3, 3, 0, 2, FATAL, self as u8]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_one_record() {
        assert_eq!(Alert::UnrecognizedName.to_bytes(), [0x15, 3, 3, 0, 2, 2, 0x70]);
    }
}
