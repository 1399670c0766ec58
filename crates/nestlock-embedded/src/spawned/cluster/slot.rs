//! The slots of a cluster, and the slot of a key.

/// The number of slots.
pub(super) const SLOTS: u16 = 16_384;

/// Returns the CRC16 (XMODEM) of the key, modulo the number of slots. If the part between the first
/// `{` and the next `}` is not empty, only that part is hashed.
pub(super) fn slot_of(key: &[u8]) -> u16 {
    let tag = key.iter().position(|byte| *byte == b'{').and_then(|open| {
        let rest = &key[open + 1..];
        let close = rest.iter().position(|byte| *byte == b'}')?;
        (close > 0).then(|| &rest[..close])
    });
    let mut crc = 0_u16;
    for byte in tag.unwrap_or(key) {
        crc ^= u16::from(*byte) << 8;
        for _ in 0..8 {
            crc = if crc & 0x8000 == 0 {
                crc << 1
            } else {
                crc << 1 ^ 0x1021
            };
        }
    }
    crc % SLOTS
}

#[cfg(test)]
mod tests {
    use super::slot_of;

    #[test]
    fn as_in_the_specification() {
        // the check value of CRC16 (XMODEM), which is a valid slot as it stands
        assert_eq!(slot_of(b"123456789"), 0x31c3);
        assert_eq!(slot_of(b""), 0);
        assert_eq!(slot_of(b"foo"), 12182);
        assert_eq!(slot_of(b"{user1000}.following"), slot_of(b"user1000"));
        assert_eq!(slot_of(b"foo{{bar}}zap"), slot_of(b"{bar"));
        assert_eq!(slot_of(b"foo{bar}{zap}"), slot_of(b"bar"));
        assert_ne!(slot_of(b"foo{}{bar}"), slot_of(b"bar"));
    }
}
