//! Finds the end of RESP frames.

/// Returns the first line without its type byte, and its length with the line end.
pub fn line(bytes: &[u8]) -> Option<(&str, usize)> {
    let end = bytes.windows(2).position(|pair| pair == b"\r\n")?;
    Some((std::str::from_utf8(&bytes[1..end]).unwrap_or(""), end + 2))
}

/// Returns the length of the first frame (RESP2 or RESP3). Returns `None` if it is incomplete.
pub fn frame_len(bytes: &[u8]) -> Option<usize> {
    let (first, mut at) = line(bytes)?;
    let count = first.parse::<i64>().unwrap_or(0);
    let children = match bytes[0] {
        b'$' | b'!' | b'=' if count >= 0 => {
            at += usize::try_from(count).expect("a length") + 2;
            0
        }
        b'*' | b'~' | b'>' => count,
        b'%' => 2 * count,
        b'|' => 2 * count + 1,
        _ => 0,
    };
    for _ in 0..children {
        at += frame_len(bytes.get(at..)?)?;
    }
    (at <= bytes.len()).then_some(at)
}
