//! What a server's errors mean: what the caller can do, and whether anything was executed.

use crate::error::{StoreError, StoreErrorKind};

/// Error codes, and their kinds. The server sends each of these before a script has changed
/// anything.
const REFUSALS: [(&str, StoreErrorKind); 20] = {
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
        // the reply to a blocked BLPOP when the master becomes a replica
        ("UNBLOCKED", K::ReadOnly),
        ("CROSSSLOT", K::CrossSlot),
        ("OOM", K::OutOfMemory),
        ("MISCONF", K::Misconfigured),
        ("NOREPLICAS", K::NoReplicas),
        ("NOPERM", K::NoPermission),
        ("NOAUTH", K::Auth),
        ("WRONGPASS", K::Auth),
        ("WRONGTYPE", K::WrongType),
        // the reply to HELLO 3 of a server without RESP3
        ("NOPROTO", K::UnknownCommand),
        // protected mode
        ("DENIED", K::Other),
    ]
};

/// How error texts without a code of their own begin, in lower case: from servers, from hosted
/// services, and inside scripts. nestlock's scripts leave nothing behind if a command is rejected.
const TEXTS: [(&str, StoreErrorKind); 14] = {
    use StoreErrorKind as K;
    [
        ("unknown command", K::UnknownCommand),
        ("unknown subcommand", K::UnknownCommand),
        ("unsupported command", K::UnknownCommand),
        ("command is not available", K::UnknownCommand),
        ("unknown redis command called from", K::UnknownCommand),
        ("unknown valkey command called from", K::UnknownCommand),
        ("this redis command is not allowed from", K::UnknownCommand),
        ("this valkey command is not allowed from", K::UnknownCommand),
        // an ACL error inside a script: up to Redis 7.0, and later
        ("the user executing the script can't ", K::NoPermission),
        ("acl failure in script: ", K::NoPermission),
        ("max number of clients", K::Unavailable),
        // replies to SELECT
        ("db index is out of range", K::Other),
        ("select is not allowed in cluster mode", K::Other),
        // errors of nestlock's own scripts, raised before the first write
        ("nestlock: ", K::Other),
    ]
};

/// What precedes the name of a command, in lower case.
const BEFORE_ITS_NAME: [&str; 4] = [
    "unknown command ",
    "unsupported command ",
    "command is not available: ",
    "to run the ",
];
/// Where a server starts to quote the rejected request, with the script's text and the values to
/// write.
const QUOTED: &str = ", with args beginning with";
/// The commands of a handshake, for both wires.
const HANDSHAKE: [&str; 7] = [
    "hello",
    "auth",
    "select",
    "ping",
    "info",
    "client",
    "client|id",
];
/// Replaces text that is not recognized.
const NOT_SHOWN: &str = "an error whose text is not shown because it may quote the password";

/// Parts of connect errors that say more than "disconnected": from TLS and the system, as both
/// wires word them.
const AT_CONNECT: [(&str, StoreErrorKind); 13] = {
    use StoreErrorKind as K;
    [
        ("invalid peer certificate", K::Tls),
        ("received fatal alert", K::Tls),
        ("received corrupt message", K::Tls),
        ("peer is incompatible", K::Tls),
        ("invalid dns name", K::Tls),
        ("invalidcertificate(", K::Tls),
        ("alertreceived(", K::Tls),
        ("invalidmessage(", K::Tls),
        ("peerincompatible(", K::Tls),
        ("invaliddnsname", K::Tls),
        ("permission denied", K::NoPermission),
        ("not resp", K::Protocol),
        ("timed out", K::Timeout),
    ]
};

/// Returns whether the error says that the server lacks a command.
pub(crate) fn is_unknown_command(error: &str) -> bool {
    known(error) == Some(StoreErrorKind::UnknownCommand)
}

/// Converts a server's error text. The quoted request is cut off.
pub(crate) fn error(said: String) -> StoreError {
    let (kind, may_have_executed) = verdict(&said);
    let command = named(&said).map(str::to_owned);
    let said = match said.find(QUOTED) {
        Some(at) if kind == StoreErrorKind::UnknownCommand => said[..at].to_owned(),
        _ => said,
    };
    StoreError::new(kind, may_have_executed, said).about(command.as_deref())
}

/// Converts the error of a handshake that contained a password. A proxy in front of the server may
/// quote the password in words of its own, so only known words are shown.
pub(crate) fn login_error(said: &str) -> StoreError {
    let (kind, may_have_executed) = verdict(said);
    let command = named(said).filter(|name| {
        HANDSHAKE
            .iter()
            .any(|known| known.eq_ignore_ascii_case(name))
    });
    let words = recognized(said).map_or(NOT_SHOWN, |(words, _)| words);
    let shown = command.map_or_else(|| words.to_owned(), |command| format!("{words}: {command}"));
    StoreError::new(kind, may_have_executed, shown).about(command)
}

/// Derives the kind of a connect error from its text, so that lasting causes differ from transient
/// ones. An error whose kind is more specific stays as it is.
pub(crate) fn at_connect(error: StoreError) -> StoreError {
    let said = error.said();
    let lower = said.to_lowercase();
    let stays = AT_CONNECT
        .into_iter()
        .find(|(part, _)| lower.contains(part))
        .map(|(_, kind)| kind);
    let is_open = matches!(
        error.kind(),
        StoreErrorKind::Disconnected | StoreErrorKind::Protocol | StoreErrorKind::Other
    );
    stays
        .filter(|_| is_open)
        .map_or(error, |kind| StoreError::new(kind, false, said))
}

/// Returns the command that an error names.
fn named(said: &str) -> Option<&str> {
    let lower = said.to_ascii_lowercase();
    let from = BEFORE_ITS_NAME
        .into_iter()
        .find_map(|before| Some(lower.find(before)? + before.len()))?;
    let name = said[from..]
        .trim_start_matches(['\'', '`', '"'])
        .split(['\'', '`', '"', ',', ' '])
        .next();
    name.filter(|name| !name.is_empty() && !said[from..].starts_with("called from"))
}

/// Returns the kind of an error, and whether the request may have been executed: true unless the
/// error proves the opposite.
pub(crate) fn verdict(error: &str) -> (StoreErrorKind, bool) {
    known(error).map_or((StoreErrorKind::Other, true), |kind| (kind, false))
}

/// Returns the error of a script. It is in doubt if a command inside the script may have caused it,
/// because earlier commands may have written. A script may also catch such an error and return it,
/// in words of its own.
pub(crate) fn of_a_script(error: StoreError) -> StoreError {
    use StoreErrorKind as K;
    let may_be_inside = matches!(
        error.kind(),
        K::ReadOnly
            | K::OutOfMemory
            | K::Misconfigured
            | K::NoReplicas
            | K::WrongType
            | K::NoPermission
            | K::UnknownCommand
            | K::Other
    );
    if may_be_inside {
        error.that_may_have_executed()
    } else {
        error
    }
}

/// Returns whether the command runs a script.
pub(crate) fn is_script(command: &str) -> bool {
    [
        "EVAL",
        "EVALSHA",
        "EVAL_RO",
        "EVALSHA_RO",
        "FCALL",
        "FCALL_RO",
    ]
    .into_iter()
    .any(|script| script.eq_ignore_ascii_case(command))
}

/// Returns whether this is a known server error, which is sent before anything has changed.
pub(crate) fn is_known(error: &str) -> bool {
    known(error).is_some()
}

fn known(error: &str) -> Option<StoreErrorKind> {
    recognized(error).map(|(_, kind)| kind)
}

/// Returns the words that identify an error, and its kind.
fn recognized(error: &str) -> Option<(&str, StoreErrorKind)> {
    let said = said_inside(error);
    let code = said.split([' ', ':']).next().unwrap_or("");
    if let Some((_, kind)) = REFUSALS.into_iter().find(|(refusal, _)| *refusal == code) {
        return Some((code, kind));
    }
    let text = said.strip_prefix("ERR ").unwrap_or(said);
    let lower = text.to_ascii_lowercase();
    let (begin, kind) = TEXTS
        .into_iter()
        .find(|(begin, _)| lower.starts_with(begin))?;
    Some((&text[..begin.len()], kind))
}

/// Returns the error of a command inside a script. Redis 6 wraps it, once or twice:
/// `ERR Error running script (call to f_30ad): @user_script:1: @user_script: 1: -OOM ...`
/// If a script returns an error that it caught, the first part is missing.
fn said_inside(details: &str) -> &str {
    let wrapped = details
        .strip_prefix("ERR Error running script")
        .and_then(|rest| rest.split_once(": "));
    let mut said = wrapped.map_or(details, |(_, said)| said);
    if wrapped.is_none() && !said.starts_with("@user_script:") {
        return details;
    }
    while let Some((_, inner)) = said
        .strip_prefix("@user_script:")
        .and_then(|rest| rest.split_once(": "))
    {
        said = inner;
    }
    said.strip_prefix('-').unwrap_or(said)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Replies of redis-server 6.2.14, word for word, without their common prefix.
    #[test]
    fn what_redis_6_wraps_is_sorted_as_what_later_ones_say() {
        use StoreErrorKind as K;
        const CALL: &str = "ERR Error running script (call to f_30ada88aea1b8902e826c526ebaa64270516b3ec): @user_script:1: ";
        for (twice, said, kind) in [
            (
                false,
                "WRONGTYPE Operation against a key holding the wrong kind of value",
                K::WrongType,
            ),
            (
                true,
                "-OOM command not allowed when used memory > 'maxmemory'.",
                K::OutOfMemory,
            ),
            (
                true,
                "-NOREPLICAS Not enough good replicas to write.",
                K::NoReplicas,
            ),
            (
                true,
                "-READONLY You can't write against a read only replica.",
                K::ReadOnly,
            ),
            (
                true,
                "-MISCONF Redis is configured to save RDB snapshots, but it is currently not able to persist on disk. \
                 Commands that may modify the data set are disabled, because this instance is configured to report errors \
                 during writes if RDB snapshotting fails (stop-writes-on-bgsave-error option). Please check the Redis logs \
                 for details about the RDB error.",
                K::Misconfigured,
            ),
            (
                true,
                "The user executing the script can't run this command or subcommand",
                K::NoPermission,
            ),
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
            let details = format!(
                "{CALL}{}{said}",
                if twice { "@user_script: 1: " } else { "" }
            );
            assert_eq!(verdict(&details), (kind, false), "{details}");
            if twice {
                let caught = format!("@user_script: 23: {said}");
                assert_eq!(verdict(&caught), (kind, false), "{caught}");
            }
        }
        // a code further on in the text does not count
        for said in [
            "ERR value is BUSY or not a READONLY integer",
            "@user_script: 1: Unknown Redis command, ASK MOVED",
        ] {
            let details = format!("{CALL}{said}");
            assert_eq!(verdict(&details), (K::Other, true), "{details}");
        }
    }

    /// The texts of servers, hosted services and scripts.
    #[test]
    fn a_command_that_is_not_there_is_named_and_was_not_executed() {
        for (said, command) in [
            (
                "ERR unknown command 'EVAL', with args beginning with: 'return 1' '0' ",
                Some("EVAL"),
            ),
            (
                "ERR unknown command `wait`, with args beginning with: `1`, ",
                Some("wait"),
            ),
            ("ERR unknown command 'EVALSHA'", Some("EVALSHA")),
            ("ERR Unknown command", None),
            (
                "ERR Command is not available: 'WAIT'. See the manual",
                Some("WAIT"),
            ),
            ("ERR unsupported command 'publish'", Some("publish")),
            (
                "ERR Unknown Redis command called from script script: 6bb2, on @user_script:29.",
                None,
            ),
            (
                "ERR Unknown command called from script script: 6bb2, on @user_script:29.",
                None,
            ),
            (
                "ERR This Redis command is not allowed from script script: 6bb2, on @user_script:1.",
                None,
            ),
            (
                "ERR Error running script (call to f_30ad): @user_script:1: @user_script: 1: Unknown Redis command called \
                 from Lua script",
                None,
            ),
            ("NOPROTO unsupported protocol version", None),
        ] {
            let error = error(said.to_owned());
            assert_eq!(
                (error.kind(), error.may_have_executed()),
                (StoreErrorKind::UnknownCommand, false),
                "{said}"
            );
            assert_eq!(error.command(), command, "{said}");
            assert!(!error.said().contains("beginning with"), "{said}");
        }
        for denied in [
            "NOPERM this user has no permissions to run the 'evalsha' command or its subcommand",
            "ERR ACL failure in script: User u has no permissions to run the 'evalsha' command script: 30ad, on @user_script:1.",
        ] {
            assert_eq!(
                error(denied.to_owned()).command(),
                Some("evalsha"),
                "{denied}"
            );
        }
    }

    /// Whatever text surrounds the password, and in whatever form it is quoted.
    #[test]
    fn a_login_that_is_refused_is_told_by_known_words() {
        use StoreErrorKind as K;
        for (said, kind, shown) in [
            (
                "WRONGPASS invalid username-password pair or user is disabled.",
                K::Auth,
                "WRONGPASS",
            ),
            (
                "WRONGPASS: s3cret is not u's password",
                K::Auth,
                "WRONGPASS",
            ),
            (
                "ERR max number of clients reached",
                K::Unavailable,
                "max number of clients",
            ),
            (
                "ERR DB index is out of range",
                K::Other,
                "DB index is out of range",
            ),
            (
                "ERR unknown command 'HELLO', with args beginning with: 's3cret'",
                K::UnknownCommand,
                "unknown command: HELLO",
            ),
            (
                "ERR unknown command 's3cret'",
                K::UnknownCommand,
                "unknown command",
            ),
            (
                "NOPERM u has no permissions to run the 'select' command",
                K::NoPermission,
                "NOPERM: select",
            ),
            (
                "NOPERM u has no permissions to run the 's3cret' command",
                K::NoPermission,
                "NOPERM",
            ),
            (
                "ERR I do not understand HELLO 3 AUTH u s3cret",
                K::Other,
                NOT_SHOWN,
            ),
            ("s3cret", K::Other, NOT_SHOWN),
            ("", K::Other, NOT_SHOWN),
        ] {
            let error = login_error(said);
            assert_eq!((error.kind(), &*error.said()), (kind, shown), "{said}");
            assert!(
                !format!("{error} {error:?} {:?}", error.command()).contains("s3cret"),
                "{said}"
            );
        }
    }

    #[test]
    fn what_stays_is_told_from_what_may_pass() {
        use StoreErrorKind as K;
        assert_eq!(
            verdict("ERR max number of clients reached"),
            (K::Unavailable, false)
        );
        for (said, kind) in [
            ("invalid peer certificate: UnknownIssuer", K::Tls),
            ("received fatal alert: CertificateRequired", K::Tls),
            (
                "the connection ended before the reply arrived: the reply is not RESP",
                K::Protocol,
            ),
            ("Permission denied (os error 13)", K::NoPermission),
            ("Connection refused (os error 111)", K::Disconnected),
            ("tls handshake eof", K::Disconnected),
        ] {
            let error = at_connect(StoreError::new(K::Disconnected, false, said));
            assert_eq!(error.kind(), kind, "{said}");
        }
        // a specific kind from the server is kept
        assert_eq!(
            at_connect(StoreError::new(K::Auth, false, "permission denied")).kind(),
            K::Auth
        );
    }

    /// Redis 7.2 and Valkey.
    #[test]
    fn what_later_servers_say_of_the_acl_is_no_permission() {
        for denied in [
            "ERR ACL failure in script: User u has no permissions to run the 'hset' command script: 30ad, on @user_script:1.",
            "ERR ACL failure in script: No permissions to access a key script: 30ad, on @user_script:1.",
            "NOPERM User u has no permissions to run the 'evalsha' command",
        ] {
            assert_eq!(
                verdict(denied),
                (StoreErrorKind::NoPermission, false),
                "{denied}"
            );
        }
    }

    #[test]
    fn s9_codes_are_found_plain_and_wrapped() {
        let kind = |details| verdict(details);
        assert_eq!(
            kind("OOM command not allowed"),
            (StoreErrorKind::OutOfMemory, false)
        );
        assert_eq!(kind("BUSY Redis is busy"), (StoreErrorKind::Busy, false));
        assert_eq!(
            kind(
                "ERR Error running script (call to f_ab): @user_script:12: WRONGTYPE Operation against a key"
            ),
            (StoreErrorKind::WrongType, false)
        );
        assert_eq!(
            kind("ERR Error running script: @user_script:1: -OOM command not allowed").0,
            StoreErrorKind::OutOfMemory
        );
        for what in [
            "run this command or subcommand",
            "publish to the channel mentioned in the command",
        ] {
            let denied = format!(
                "ERR The user executing the script can't {what} script: 6bb2, on @user_script:29."
            );
            assert_eq!(verdict(&denied), (StoreErrorKind::NoPermission, false));
        }
        assert_eq!(
            kind("ERR nestlock: the token key holds no token"),
            (StoreErrorKind::Other, false)
        );
        assert_eq!(kind("channel closed"), (StoreErrorKind::Other, true));
        let unblocked = "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)";
        assert_eq!(kind(unblocked), (StoreErrorKind::ReadOnly, false));
    }
}
