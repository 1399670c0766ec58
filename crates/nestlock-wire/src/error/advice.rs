//! Advice on what to do about an error: one line, appended to the error's text.

use std::borrow::Cow;

use super::{StoreError, StoreErrorKind};

const OLD_SERVER: &str = "HELLO 3 is required: use Redis 6.2 or later, or Valkey";
const CHECK_LOGIN: &str = "check the user and password; in a URL: redis://user:password@host:port, with special characters as %NN";
const NO_ACCESS: &str = "this process may not open the socket: check `unixsocketperm`";
const NO_LISTENER: &str = "no server listens there: check host and port";
const NO_TLS: &str = "the port does not speak TLS: use redis://";
const OTHER_NAME: &str = "connect by a name in the certificate, or set that name: `Tls::server_name`, or --tls-server-name";
const CLIENT_CERTIFICATE: &str = "the server requires a client certificate that it trusts: `Tls::client_cert_pem`, or --tls-cert and --tls-key";

/// Advice by a part of the error's text; the first match counts. nestlock's guide has a row for
/// each.
const BY_TEXT: [(&str, &str); 25] = [
    (
        "credential provider returned",
        "have these credentials expired, and does each server have this user?",
    ),
    (
        "provider has not returned",
        "does it block? Make the connect timeout four times as long as one of its calls",
    ),
    ("NOPROTO", OLD_SERVER),
    (
        "max number of clients",
        "raise `maxclients`, or share clients: each has 2 connections, in a cluster 2 to each node",
    ),
    (
        "NOAUTH",
        "log in with a user and password: redis://user:password@host:port",
    ),
    ("WRONGPASS", CHECK_LOGIN),
    (
        "DENIED",
        "the server is in protected mode: set a password there, and add it to the URL",
    ),
    (
        "DB index is out of range",
        "the server has fewer databases than the URL says: see `databases`",
    ),
    (
        "oo many open files",
        "this process is out of file descriptors: raise the limit, `ulimit -n`",
    ),
    ("ermission denied", NO_ACCESS),
    (
        "lookup address",
        "DNS found no address for this host: check its name",
    ),
    (
        "that the cluster announces",
        "announce an address that clients can reach: `cluster-announce-ip`, or `cluster-announce-hostname`",
    ),
    ("onnection refused", NO_LISTENER),
    ("not RESP", "is it the port of a Redis server?"),
    ("in plain text", "if the port speaks TLS, use rediss://"),
    ("corrupt message", NO_TLS),
    ("InvalidContentType", NO_TLS),
    (
        "by TLS within",
        "if the port does not speak TLS, use redis://",
    ),
    (
        "UnknownIssuer",
        "trust the CA that signed it: `Tls::ca_pem`, or --tls-ca",
    ),
    (
        "UnsupportedCertVersion",
        "it is X.509 v1: issue it as v3, with a subjectAltName",
    ),
    ("not valid for", OTHER_NAME),
    ("NotValidForName", OTHER_NAME),
    (
        "xpired",
        "renew the server's certificate, or correct this machine's clock",
    ),
    ("UnknownCA", CLIENT_CERTIFICATE),
    ("ertificateRequired", CLIENT_CERTIFICATE),
];

impl StoreError {
    /// Returns one line of advice on what to do about the error.
    pub(crate) fn advice(&self) -> Option<Cow<'static, str>> {
        use StoreErrorKind as K;
        let said = self.said();
        // these texts are about connecting; a request that was sent has failed otherwise
        let by_text = BY_TEXT
            .into_iter()
            .find(|(part, _)| !self.may_have_executed && said.contains(part));
        if let Some((_, advice)) = by_text {
            return Some(advice.into());
        }
        let command = self.command();
        match self.kind {
            K::UnknownCommand
                if command.is_some_and(|command| command.eq_ignore_ascii_case("HELLO")) =>
            {
                Some(OLD_SERVER.into())
            }
            K::UnknownCommand => {
                let command = command.unwrap_or("the command").to_uppercase();
                let which = if command.contains(',') {
                    "whichever is missing of "
                } else {
                    ""
                };
                let command = command.replace(',', ", ");
                Some(
                    format!("enable {which}{command} under its own name; Redis 6.2 or later, or Valkey, is required")
                        .into(),
                )
            }
            K::NoPermission => Some("allow it in the ACL: `nestlock acl` prints the rules".into()),
            K::Auth => Some(CHECK_LOGIN.into()),
            _ => None,
        }
    }
}

/// Returns all advice that errors give, for the test that the guide has each line of it.
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
