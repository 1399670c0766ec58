//! The digest of a script.

/// Returns the digest by which the server knows a script.
pub(crate) fn sha1(source: &str) -> String {
    sha1_smol::Sha1::from(source).digest().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// S8: with a digest of another kind, or of other bytes, each EVALSHA would be a NOSCRIPT.
    #[test]
    fn s8_the_digest_is_the_servers() {
        assert_eq!(sha1("return 1"), "e0e1f9fabfc9d4800c877a703b823ac0578ff8db");
    }
}
