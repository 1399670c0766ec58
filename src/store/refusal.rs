//! What a server's errors mean: what the caller can do, and whether anything was executed.

use crate::error::StoreErrorKind;

/// What the server's error codes mean. Each of these is said before a script has changed anything.
const REFUSALS: [(&str, StoreErrorKind); 18] = {
    use StoreErrorKind as K;
    [
        ("NOSCRIPT", K::NoScript),
        ("MOVED", K::Moved),
        ("ASK", K::Moved),
        ("TRYAGAIN", K::TryAgain),
        ("BUSY", K::Busy),
        ("LOADING", K::Loading),
        ("MASTERDOWN", K::MasterDown),
        ("CLUSTERDOWN", K::ClusterDown),
        ("READONLY", K::ReadOnly),
        // of a BLPOP, when the master becomes a replica
        ("UNBLOCKED", K::ReadOnly),
        ("CROSSSLOT", K::CrossSlot),
        ("OOM", K::OutOfMemory),
        ("MISCONF", K::Misconfigured),
        ("NOREPLICAS", K::NoReplicas),
        ("NOPERM", K::NoPermission),
        ("NOAUTH", K::Auth),
        ("WRONGPASS", K::Auth),
        ("WRONGTYPE", K::WrongType),
    ]
};

/// The kind of an error, and whether the request may have been executed: yes, unless the opposite is proven.
pub(super) fn verdict(error: &str) -> (StoreErrorKind, bool) {
    known(error).map_or((StoreErrorKind::Other, true), |kind| (kind, false))
}

/// Whether this is an error of a server's, of a kind that it says before anything has changed.
pub(super) fn is_known(error: &str) -> bool {
    known(error).is_some()
}

fn known(error: &str) -> Option<StoreErrorKind> {
    let said = said_inside(error);
    let code = said.split([' ', ':']).next().unwrap_or("");
    if let Some((_, kind)) = REFUSALS.into_iter().find(|(refusal, _)| *refusal == code) {
        return Some(kind);
    }
    let text = said.strip_prefix("ERR ").unwrap_or(said);
    // our own refusals come before the first write
    if text.starts_with("nestlock: ") {
        return Some(StoreErrorKind::Other);
    }
    // without a code of its own, where a script meets the ACL: Redis up to 7.0, and later. Our scripts ask before they
    // write
    let denied = ["The user executing the script can't ", "ACL failure in script: "];
    denied.iter().any(|denied| text.starts_with(denied)).then_some(StoreErrorKind::NoPermission)
}

/// What a command inside a script said. Redis 6 wraps it, once or twice:
/// `ERR Error running script (call to f_30ad...): @user_script:1: @user_script: 1: -OOM command not allowed ...`
/// Where a script returns what it caught, the beginning is missing.
fn said_inside(details: &str) -> &str {
    let wrapped = details.strip_prefix("ERR Error running script").and_then(|rest| rest.split_once(": "));
    let mut said = wrapped.map_or(details, |(_, said)| said);
    if wrapped.is_none() && !said.starts_with("@user_script:") {
        return details;
    }
    while let Some((_, inner)) = said.strip_prefix("@user_script:").and_then(|rest| rest.split_once(": ")) {
        said = inner;
    }
    said.strip_prefix('-').unwrap_or(said)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What redis-server 6.2.14 said, word for word: `{}` stands for what they put before it.
    #[test]
    fn what_redis_6_wraps_is_sorted_as_what_later_ones_say() {
        use StoreErrorKind as K;
        const CALL: &str =
            "ERR Error running script (call to f_30ada88aea1b8902e826c526ebaa64270516b3ec): @user_script:1: ";
        for (twice, said, kind) in [
            (false, "WRONGTYPE Operation against a key holding the wrong kind of value", K::WrongType),
            (true, "-OOM command not allowed when used memory > 'maxmemory'.", K::OutOfMemory),
            (true, "-NOREPLICAS Not enough good replicas to write.", K::NoReplicas),
            (true, "-READONLY You can't write against a read only replica.", K::ReadOnly),
            (
                true,
                "-MISCONF Redis is configured to save RDB snapshots, but it is currently not able to persist on disk. \
                 Commands that may modify the data set are disabled, because this instance is configured to report errors \
                 during writes if RDB snapshotting fails (stop-writes-on-bgsave-error option). Please check the Redis logs \
                 for details about the RDB error.",
                K::Misconfigured,
            ),
            (true, "The user executing the script can't run this command or subcommand", K::NoPermission),
            (
                true,
                "The user executing the script can't access at least one of the keys mentioned in the command arguments",
                K::NoPermission,
            ),
            (
                true,
                "The user executing the script can't publish to the channel mentioned in the command",
                K::NoPermission,
            ),
        ] {
            let details = format!("{CALL}{}{said}", if twice { "@user_script: 1: " } else { "" });
            assert_eq!(verdict(&details), (kind, false), "{details}");
            if twice {
                let caught = format!("@user_script: 23: {said}");
                assert_eq!(verdict(&caught), (kind, false), "{caught}");
            }
        }
        // what a word further on says is nothing
        for said in ["ERR value is BUSY or not a READONLY integer", "@user_script: 1: Unknown Redis command, ASK MOVED"]
        {
            let details = format!("{CALL}{said}");
            assert_eq!(verdict(&details), (K::Other, true), "{details}");
        }
    }

    /// Redis 7.2 and Valkey.
    #[test]
    fn what_later_servers_say_of_the_acl_is_no_permission() {
        for denied in [
            "ERR ACL failure in script: User u has no permissions to run the 'hset' command script: 30ad, on @user_script:1.",
            "ERR ACL failure in script: No permissions to access a key script: 30ad, on @user_script:1.",
            "NOPERM User u has no permissions to run the 'evalsha' command",
        ] {
            assert_eq!(verdict(denied), (StoreErrorKind::NoPermission, false), "{denied}");
        }
    }

    #[test]
    fn s9_codes_are_found_plain_and_wrapped() {
        let kind = |details| verdict(details);
        assert_eq!(kind("OOM command not allowed"), (StoreErrorKind::OutOfMemory, false));
        assert_eq!(kind("BUSY Redis is busy"), (StoreErrorKind::Busy, false));
        assert_eq!(
            kind("ERR Error running script (call to f_ab): @user_script:12: WRONGTYPE Operation against a key"),
            (StoreErrorKind::WrongType, false)
        );
        assert_eq!(
            kind("ERR Error running script: @user_script:1: -OOM command not allowed").0,
            StoreErrorKind::OutOfMemory
        );
        for what in ["run this command or subcommand", "publish to the channel mentioned in the command"] {
            let denied = format!("ERR The user executing the script can't {what} script: 6bb2, on @user_script:29.");
            assert_eq!(verdict(&denied), (StoreErrorKind::NoPermission, false));
        }
        assert_eq!(kind("ERR nestlock: the token key holds no token"), (StoreErrorKind::Other, false));
        assert_eq!(kind("channel closed"), (StoreErrorKind::Other, true));
        let unblocked = "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)";
        assert_eq!(kind(unblocked), (StoreErrorKind::ReadOnly, false));
    }
}
