//! Patterns of names, as KEYS, SCAN and PSUBSCRIBE take them.

/// Returns whether a text matches a Redis pattern: `*`, `?`, `[a-c]`, `[^a]`, `\` before a
/// character.
///
/// As in Redis, an empty text matches only an empty pattern.
pub(super) fn glob(pattern: &[u8], text: &[u8]) -> bool {
    if text.is_empty() {
        return pattern.is_empty();
    }
    // the pattern position after the last `*`, and where its match ends in the text: only the last
    // `*` ever has to be extended
    let (mut p, mut t) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    loop {
        let advanced = match pattern.get(p) {
            Some(b'*') => {
                star = Some((p + 1, t));
                p += 1;
                continue;
            }
            None if t == text.len() => return true,
            Some(_) if t < text.len() => match_one(&pattern[p..], text[t]),
            _ => None,
        };
        if let Some(used) = advanced {
            p += used;
            t += 1;
        } else if let Some((after, taken)) = star.filter(|(_, taken)| *taken < text.len()) {
            star = Some((after, taken + 1));
            (p, t) = (after, taken + 1);
        } else {
            return false;
        }
    }
}

/// Returns how many bytes of the pattern match this byte. Returns `None` if it does not match.
fn match_one(pattern: &[u8], byte: u8) -> Option<usize> {
    match pattern[0] {
        b'?' => Some(1),
        b'[' => {
            let mut at = 1;
            let not = pattern.get(at) == Some(&b'^');
            if not {
                at += 1;
            }
            let mut found = false;
            loop {
                match pattern.get(at) {
                    Some(b'\\') if at + 1 < pattern.len() => {
                        at += 1;
                        found |= pattern[at] == byte;
                    }
                    Some(b']') => break,
                    // an unterminated class: what has been read of it counts
                    None => {
                        at -= 1;
                        break;
                    }
                    Some(low) if pattern.get(at + 1) == Some(&b'-') && at + 2 < pattern.len() => {
                        let high = pattern[at + 2];
                        found |= (*low.min(&high)..=*low.max(&high)).contains(&byte);
                        at += 2;
                    }
                    Some(one) => found |= *one == byte,
                }
                at += 1;
            }
            (found != not).then_some(at + 1)
        }
        b'\\' if pattern.len() > 1 => (pattern[1] == byte).then_some(2),
        one => (one == byte).then_some(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_in_redis() {
        for (pattern, text, fits) in [
            ("*", "", false),
            ("", "", true),
            ("a*c", "abbc", true),
            ("a*c", "abcd", false),
            ("a?c", "abc", true),
            ("?", "", false),
            ("[a-c]x", "bx", true),
            ("[c-a]x", "bx", true),
            ("[^a-c]x", "bx", false),
            ("\\*", "*", true),
            ("\\*", "a", false),
            ("a*b*c", "a-b-b-c", true),
            ("[ab", "b", true),
            ("**", "x", true),
        ] {
            assert_eq!(
                glob(pattern.as_bytes(), text.as_bytes()),
                fits,
                "{pattern} {text}"
            );
        }
    }
}
