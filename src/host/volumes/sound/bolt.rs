//! Whether a bolt database can be opened.
//!
//! The file is an array of pages. Each begins with its own number and its kind (16 bytes in all). The first two are meta
//! pages, written in turns: the valid one with the higher transaction counts, and says how many pages there are, where the root
//! is, and where the list of free pages. Numbers are in the byte order of the machine; so is the database.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

const MAGIC: u32 = 0xED0C_DAED;
const VERSION: u32 = 2;
const HEADER: usize = 16;
/// What the checksum is of: all of a meta page's body before it.
const CHECKED: usize = 56;
const BODY: usize = CHECKED + 8;
/// Powers of two, as bolt tries them when it looks for the second meta page without the first.
const PAGE_SIZES: std::ops::RangeInclusive<u32> = 10..=24;
/// In place of a page's number: the list of free pages is not kept.
const NOT_KEPT: u64 = u64::MAX;

const BRANCH: u16 = 1;
const LEAF: u16 = 2;
const FREE: u16 = 0x10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Meta {
    page_size: u64,
    root: u64,
    free: u64,
    /// So many pages there are.
    pages: u64,
    transaction: u64,
}

/// `None`: bolt opens it. A daemon may be writing to it meanwhile.
pub(super) fn complaint(file: &File) -> io::Result<Option<String>> {
    if file.metadata()?.len() == 0 {
        // Made a moment ago, perhaps before the power was cut: bolt makes a database of it.
        return Ok(None);
    }
    let Some(meta) = current(file)? else { return Ok(Some("neither of its two meta pages is valid".to_owned())) };
    // It is made longer before a meta page says so, hence the length after the page.
    let (length, wanted) = (file.metadata()?.len(), meta.pages.saturating_mul(meta.page_size));
    if length < wanted {
        return Ok(Some(format!("it is cut off, with {length} bytes of {wanted}")));
    }
    let found = pages_of(file, &meta)?;
    // Pages are reused by the second transaction from now; whoever makes one could open the database.
    if found.is_some() && current(file)? != Some(meta) {
        return Ok(None);
    }
    Ok(found)
}

fn pages_of(file: &File, meta: &Meta) -> io::Result<Option<String>> {
    for (what, number, kinds) in [("root", meta.root, &[BRANCH, LEAF][..]), ("free list", meta.free, &[FREE])] {
        if number == NOT_KEPT && what != "root" {
            continue;
        }
        let header = number.checked_mul(meta.page_size).filter(|_| number < meta.pages);
        let header = match header {
            Some(offset) => read::<HEADER>(file, offset)?,
            None => None,
        };
        let sound = header.is_some_and(|header| {
            number_at(&header, 0) == number && kinds.contains(&u16::from_ne_bytes([header[8], header[9]]))
        });
        if !sound {
            return Ok(Some(format!("page {number}, its {what}, is something else")));
        }
    }
    Ok(None)
}

/// The meta page that counts.
fn current(file: &File) -> io::Result<Option<Meta>> {
    let first = meta_at(file, 0)?;
    let second = if let Some(first) = first {
        meta_at(file, first.page_size)?
    } else {
        let mut second = None;
        for bits in PAGE_SIZES {
            second = second.or(meta_at(file, 1 << bits)?);
        }
        second
    };
    Ok(first.into_iter().chain(second).max_by_key(|meta| meta.transaction))
}

/// `None` where no valid one is.
fn meta_at(file: &File, offset: u64) -> io::Result<Option<Meta>> {
    let Some(page) = read::<{ HEADER + BODY }>(file, offset)? else { return Ok(None) };
    let body = &page[HEADER..];
    let valid = word_at(body, 0) == MAGIC && word_at(body, 4) == VERSION && number_at(body, CHECKED) == sum(body);
    let page_size = u64::from(word_at(body, 8));
    Ok((valid && page_size.is_power_of_two()).then(|| Meta {
        page_size,
        // 12: flags; 24: the sequence of the root bucket.
        root: number_at(body, 16),
        free: number_at(body, 32),
        pages: number_at(body, 40),
        transaction: number_at(body, 48),
    }))
}

/// FNV-1a of 64 bits.
fn sum(body: &[u8]) -> u64 {
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    body[..CHECKED].iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// `None` where the file ends before.
fn read<const N: usize>(file: &File, offset: u64) -> io::Result<Option<[u8; N]>> {
    let mut bytes = [0; N];
    match file.read_exact_at(&mut bytes, offset) {
        Ok(()) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Err(error) => Err(error),
    }
}

fn number_at(bytes: &[u8], offset: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[offset..offset + 8]);
    u64::from_ne_bytes(number)
}

fn word_at(bytes: &[u8], offset: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[offset..offset + 4]);
    u32::from_ne_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 4096;

    /// Two meta pages, a list of free pages, a root, and a page of data.
    fn database() -> Vec<u8> {
        let mut bytes = vec![0; 5 * PAGE];
        for (number, kind) in [(0, 4), (1, 4), (2, FREE), (3, LEAF), (4, LEAF)] {
            let page = &mut bytes[number * PAGE..];
            page[..8].copy_from_slice(&(number as u64).to_ne_bytes());
            page[8..10].copy_from_slice(&kind.to_ne_bytes());
        }
        for turn in [0, 1] {
            set_meta(&mut bytes, turn, [3, 2, 5, 10 + turn as u64]);
        }
        bytes
    }

    /// Root, free list, pages, transaction.
    fn set_meta(bytes: &mut [u8], turn: usize, [root, free, pages, transaction]: [u64; 4]) {
        let body = &mut bytes[turn * PAGE + HEADER..][..BODY];
        for (offset, word) in [(0, MAGIC), (4, VERSION), (8, PAGE as u32), (12, 0)] {
            body[offset..offset + 4].copy_from_slice(&word.to_ne_bytes());
        }
        for (offset, number) in [(16, root), (24, 0), (32, free), (40, pages), (48, transaction)] {
            body[offset..offset + 8].copy_from_slice(&number.to_ne_bytes());
        }
        let sum = sum(body);
        body[CHECKED..].copy_from_slice(&sum.to_ne_bytes());
    }

    fn of(bytes: &[u8]) -> Option<String> {
        let file = tempfile::tempfile().expect("a file");
        file.write_all_at(bytes, 0).expect("written");
        complaint(&file).expect("looked")
    }

    #[test]
    fn the_checksum_is_fnv() {
        let mut body = [0; BODY];
        assert_eq!(sum(&body), 0x8ac1_23d6_f7dc_e585, "of 56 zeros");
        body[55] = 1;
        assert_ne!(sum(&body), 0x8ac1_23d6_f7dc_e585);
        body = [0; BODY];
        body[CHECKED] = 1;
        assert_eq!(sum(&body), 0x8ac1_23d6_f7dc_e585, "not of itself");
    }

    #[test]
    fn one_valid_meta_page_will_do() {
        assert_eq!(of(&database()), None);
        for turn in [0, 1] {
            let mut bytes = database();
            bytes[turn * PAGE..][..PAGE].fill(0);
            assert_eq!(of(&bytes), None, "without meta page {turn}");
            bytes[(1 - turn) * PAGE + HEADER + 40] ^= 1;
            assert!(of(&bytes).expect("damaged").contains("meta pages"));
        }
        for wrong in [0, 4] {
            let mut bytes = database();
            for turn in [0, 1] {
                bytes[turn * PAGE + HEADER + wrong] ^= 1;
                let sum = sum(&bytes[turn * PAGE + HEADER..]);
                bytes[turn * PAGE + HEADER + CHECKED..][..8].copy_from_slice(&sum.to_ne_bytes());
            }
            assert!(of(&bytes).is_some(), "magic and version count");
        }
    }

    #[test]
    fn the_newest_valid_meta_page_counts() {
        let mut bytes = database();
        set_meta(&mut bytes, 0, [3, 2, 6, 12]);
        assert!(of(&bytes).expect("damaged").contains("20480 bytes of 24576"));
        bytes[HEADER + 48] ^= 1;
        assert_eq!(of(&bytes), None, "a write that was cut never happened");
    }

    #[test]
    fn what_is_cut_off_or_overwritten() {
        assert_eq!(of(&[]), None, "one that is not written to yet");
        let bytes = database();
        for length in 1..bytes.len() {
            if length % 97 == 0 || length + 1 == bytes.len() {
                assert!(of(&bytes[..length]).is_some(), "{length} bytes");
            }
        }
        for (page, name) in [(2, "free list"), (3, "root")] {
            for change in [0..PAGE, 0..1, 8..9] {
                let mut bytes = database();
                bytes[page * PAGE..][change].iter_mut().for_each(|byte| *byte ^= 0x40);
                assert!(of(&bytes).expect("damaged").contains(name));
            }
        }
        // Numbers from a damaged page must not be believed.
        for numbers in [[u64::MAX, 2, 5, 20], [3, 5, 5, 20], [3, 2, u64::MAX, 20], [5, 2, 5, 20]] {
            let mut bytes = database();
            set_meta(&mut bytes, 0, numbers);
            assert!(of(&bytes).is_some(), "{numbers:?}");
        }
        let mut bytes = database();
        set_meta(&mut bytes, 0, [3, NOT_KEPT, 5, 20]);
        assert_eq!(of(&bytes), None, "free pages need not be listed");
    }
}
