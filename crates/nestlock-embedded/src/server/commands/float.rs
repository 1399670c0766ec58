//! Floats as the arguments of commands, parsed as in Redis.

/// Parses a score. Returns `None` if the text is not a number as a whole, is NaN, or is out of
/// range.
pub(super) fn float(text: &[u8]) -> Option<f64> {
    if text.is_empty() || text[0].is_ascii_whitespace() {
        return None;
    }
    let number = strtod(text)?;
    let digits = text
        .strip_prefix(b"-")
        .or_else(|| text.strip_prefix(b"+"))
        .unwrap_or(text);
    let spelled_out = digits.first().is_some_and(u8::is_ascii_alphabetic);
    let mantissa = digits
        .split(|byte| b"eEpP".contains(byte))
        .next()
        .unwrap_or_default();
    let underflow = number == 0.0 && mantissa.iter().any(|digit| (b'1'..=b'9').contains(digit));
    if underflow || number.is_infinite() && !spelled_out {
        None
    } else {
        Some(number)
    }
}

/// Parses a number as C's `strtod` does. Returns `None` for NaN, or if a part of the text is left
/// over. Leading blanks are allowed, an empty text is 0, and a number out of range is infinite or
/// 0.
pub(super) fn strtod(text: &[u8]) -> Option<f64> {
    let text = std::str::from_utf8(text)
        .ok()?
        .trim_start_matches([' ', '\t', '\n', '\u{b}', '\u{c}', '\r']);
    if text.is_empty() {
        return Some(0.0);
    }
    let (sign, digits) = match text.as_bytes()[0] {
        b'-' => (-1.0, &text[1..]),
        b'+' => (1.0, &text[1..]),
        _ => (1.0, text),
    };
    let hexadecimal = digits
        .strip_prefix("0x")
        .or_else(|| digits.strip_prefix("0X"));
    let number = hexadecimal.map_or_else(
        || {
            digits
                .parse()
                .ok()
                .filter(|_| !digits.starts_with(['+', '-']))
        },
        hex_float,
    )?;
    Some(sign * number).filter(|number| !number.is_nan())
}

/// Parses the part after `0x`: digits, an optional point, and an optional `p` with a power of two.
fn hex_float(text: &str) -> Option<f64> {
    let (mantissa, exponent) = text.split_once(['p', 'P']).unwrap_or((text, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    if whole.is_empty() && fraction.is_empty() {
        return None;
    }
    let mut number = 0.0;
    for digit in whole.chars().chain(fraction.chars()) {
        number = number * 16.0 + f64::from(digit.to_digit(16)?);
    }
    let exponent: i32 = exponent.parse().ok()?;
    let places = i32::try_from(fraction.len()).ok()?;
    Some(number * f64::from(exponent.saturating_sub(places.saturating_mul(4))).exp2())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_read_as_by_strtod() {
        assert_eq!(float(b"1e3"), Some(1000.0));
        assert_eq!(float(b"-inf"), Some(f64::NEG_INFINITY));
        assert_eq!(float(b"+.5"), Some(0.5));
        assert_eq!(float(b"0x1.8p1"), Some(3.0));
        for text in [
            "", " 1", "1 ", "nan", "1e999", "1e-999", "x", "1,5", "--1", "0x", "1e",
        ] {
            assert_eq!(float(text.as_bytes()), None, "{text}");
        }
        for (text, number) in [
            ("", 0.0),
            (" 1", 1.0),
            ("1e-400", 0.0),
            ("-1e400", f64::NEG_INFINITY),
            ("0x10", 16.0),
        ] {
            assert_eq!(strtod(text.as_bytes()), Some(number), "{text}");
        }
    }
}
