//! The topology of a run: how many clients a process has, how many servers there are, and which
//! clients have proxies before them.

/// The clients of each process.
pub(crate) const CLIENTS: usize = 2;
/// The servers of a run. All locks are on the first one, except those that span several.
pub(crate) const SERVERS: usize = 3;

/// Returns the number of a client's proxies. Returns `None` for every third client, which has no
/// proxies.
pub(crate) fn link(client: usize) -> Option<usize> {
    (client % 3 != 2).then(|| client - client / 3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_thirds_are_behind_proxies() {
        let links: Vec<_> = (0..8).map(link).collect();
        assert_eq!(
            links,
            [
                Some(0),
                Some(1),
                None,
                Some(2),
                Some(3),
                None,
                Some(4),
                Some(5)
            ]
        );
    }
}
