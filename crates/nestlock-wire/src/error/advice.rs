//! What to do about an error of the store: one line behind what was said.

use std::borrow::Cow;

use super::{StoreError, StoreErrorKind};

const OLD_SERVER: &str = "nestlock needs HELLO 3: Redis 6.2 or later, or Valkey";
const NO_ACCESS: &str = "this process may not open the socket: see `unixsocketperm`";
const NO_LISTENER: &str = "no server listens there: check host and port";
const NO_TLS: &str = "the port speaks no TLS: use redis://";
const OTHER_NAME: &str =
    "connect by a name that it has, or give that: `Tls::server_name`, or --tls-server-name";
const CLIENT_CERTIFICATE: &str = "the server wants a client certificate that it trusts: `Tls::client_cert_pem`, or --tls-cert and --tls-key";

/// By a part of what was said; the first that fits counts. The guide has a row for each.
const BY_TEXT: [(&str, &str); 24] = [
    ("NOPROTO", OLD_SERVER),
    (
        "max number of clients",
        "raise `maxclients`, or share clients: each has two connections",
    ),
    ("NOAUTH", "give a login: redis://user:password@host:port"),
    (
        "DENIED",
        "the server is in protected mode: give it a password, and the URL a login",
    ),
    (
        "DB index is out of range",
        "the server has fewer databases than the URL says: see `databases`",
    ),
    (
        "oo many open files",
        "no file descriptor is left: raise the limit, `ulimit -n`",
    ),
    ("ermission denied", NO_ACCESS),
    ("PermissionDenied", NO_ACCESS),
    (
        "lookup address",
        "DNS knows no address of this host: check its name",
    ),
    (
        "that the cluster names",
        "announce one that clients reach: `cluster-announce-ip`, or `cluster-announce-hostname`",
    ),
    ("onnection refused", NO_LISTENER),
    ("ConnectionRefused", NO_LISTENER),
    ("not RESP", "is it the port of a Redis server?"),
    ("in plain text", "if the port speaks TLS, use rediss://"),
    ("corrupt message", NO_TLS),
    ("InvalidContentType", NO_TLS),
    ("by TLS within", "if the port speaks no TLS, use redis://"),
    (
        "UnknownIssuer",
        "trust the authority that signed it: `Tls::ca_pem`, or --tls-ca",
    ),
    (
        "UnsupportedCertVersion",
        "it is X.509 v1: issue it as v3, with a subjectAltName",
    ),
    ("not valid for", OTHER_NAME),
    ("NotValidForName", OTHER_NAME),
    (
        "xpired",
        "issue the server's certificate anew, or set this machine's clock",
    ),
    ("UnknownCA", CLIENT_CERTIFICATE),
    ("ertificateRequired", CLIENT_CERTIFICATE),
];

impl StoreError {
    /// One line: what to do about it.
    pub(crate) fn advice(&self) -> Option<Cow<'static, str>> {
        use StoreErrorKind as K;
        let said = self.said();
        // a release that was sent is no failure to connect
        let by_text = BY_TEXT
            .into_iter()
            .find(|(part, _)| !self.may_have_executed && said.contains(part));
        if let Some((_, advice)) = by_text {
            return Some(advice.into());
        }
        let command = self.command();
        match self.kind {
            K::UnknownCommand if command.is_some_and(|command| command.eq_ignore_ascii_case("HELLO")) => {
                Some(OLD_SERVER.into())
            }
            K::UnknownCommand => {
                let command = command.unwrap_or("the command").to_uppercase();
                let which = if command.contains(',') { "what it lacks of " } else { "" };
                let command = command.replace(',', ", ");
                Some(
                    format!("enable {which}{command} under its own name; nestlock needs Redis 6.2 or later, or Valkey")
                        .into(),
                )
            }
            K::NoPermission => Some("allow it by ACL: `nestlock acl` prints the rules".into()),
            K::Auth => {
                Some("check user and password: redis://user:password@host:port, with special characters as %NN".into())
            }
            _ => None,
        }
    }
}

/// Returns every advice that errors give, for the test that the guide has them all.
#[doc(hidden)]
#[must_use]
pub fn all_advice() -> Vec<String> {
    let by_kind = [
        StoreErrorKind::UnknownCommand,
        StoreErrorKind::NoPermission,
        StoreErrorKind::Auth,
    ]
    .into_iter()
    .filter_map(|kind| {
        let error = StoreError::new(kind, false, "").about(Some("EVAL"));
        error.advice().map(Cow::into_owned)
    });
    let by_text = BY_TEXT.into_iter().map(|(_, advice)| advice.to_owned());
    by_text.chain(by_kind).collect()
}
