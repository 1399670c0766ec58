//! Integers and doubles as Redis reads and writes them.

/// Parses an integer in the only form that Redis accepts: no sign but `-`, no leading zeros, no
/// blanks.
pub(crate) fn integer(text: &[u8]) -> Option<i64> {
    let digits = text.strip_prefix(b"-").unwrap_or(text);
    let canonical = match digits {
        [] => false,
        [b'0'] => digits.len() == text.len(),
        [first, ..] => *first != b'0' && digits.iter().all(u8::is_ascii_digit),
    };
    if canonical {
        std::str::from_utf8(text).ok()?.parse().ok()
    } else {
        None
    }
}

/// Formats a score as Redis 7.0 does: 17 significant digits, as C's `%.17g`.
pub(crate) fn double(number: f64) -> String {
    if number.is_nan() {
        return "nan".into();
    }
    if number.is_infinite() {
        return if number > 0.0 {
            "inf".into()
        } else {
            "-inf".into()
        };
    }
    if number == 0.0 {
        return if number.is_sign_negative() {
            "-0".into()
        } else {
            "0".into()
        };
    }
    let scientific = format!("{number:.16e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let trim = |text: &str| {
        if text.contains('.') {
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        } else {
            text.to_owned()
        }
    };
    if (-4..17).contains(&exponent) {
        trim(&format!(
            "{number:.*}",
            usize::try_from(16 - exponent).unwrap_or(0)
        ))
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{}e{sign}{:02}", trim(mantissa), exponent.abs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_print_like_printf() {
        for (number, text) in [
            (1.0, "1"),
            (0.5, "0.5"),
            (-2.25, "-2.25"),
            (0.1, "0.10000000000000001"),
            (1e16, "10000000000000000"),
            (1e17, "1e+17"),
            (123_456_789.125, "123456789.125"),
            (1e-5, "1.0000000000000001e-05"),
            (1.5e300, "1.5000000000000001e+300"),
            (f64::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(double(number), text);
        }
    }
}
