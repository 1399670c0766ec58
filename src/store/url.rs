//! A URL, read completely or rejected: each part is used, and no part is mistaken for another.

use std::{fmt::Write as _, net::Ipv6Addr, path::PathBuf};

use nestlock_wire::{Login, Server, Wire};

use crate::error::{Error, Result};

const FORMS: &str =
    "use redis://, redis-cluster:// or redis-sentinel://, with rediss for TLS, or redis+unix://";

/// The parts of a URL.
pub(super) struct Url {
    pub(super) leads: Leads,
    pub(super) login: Option<Login>,
    pub(super) database: Option<u8>,
    pub(super) wire: Option<Wire>,
    #[cfg_attr(
        not(feature = "rustls"),
        expect(dead_code, reason = "without TLS such a URL is refused")
    )]
    pub(super) is_secret: bool,
}

/// Where a URL leads. Has at least one address.
pub(super) enum Leads {
    Servers(Vec<Server>),
    Cluster(Vec<Server>),
    Sentinels {
        at: Vec<Server>,
        service: String,
        login: Option<Login>,
    },
    Socket(PathBuf),
}

/// The deployment that a scheme stands for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scheme {
    Server,
    Cluster,
    Sentinel,
    Socket,
}

/// Returns an error. The part after the scheme may contain a password: no error quotes it.
pub(super) fn refuse<T>(reason: impl Into<String>) -> Result<T> {
    Err(Error::InvalidConfig {
        reason: reason.into(),
    })
}

impl Url {
    /// Reads `redis://`, `redis-cluster://` or `redis-sentinel://`, or the same with TLS
    /// (`rediss..`), each with user, password, addresses separated by commas, a database, and
    /// options after `?`; or `redis+unix://`. `valkey` may replace `redis`.
    pub(super) fn read(url: &str) -> Result<Self> {
        let Some((name, rest)) = url.split_once("://") else {
            return refuse(format!("it is not a URL; {FORMS}"));
        };
        let (scheme, is_secret) = read_scheme(name)?;
        let (authority, behind) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
        refuse_unencoded(
            rest,
            behind,
            scheme == Scheme::Socket && authority.is_empty(),
        )?;
        let (login, hosts) = match authority.rsplit_once('@') {
            Some((login, hosts)) => (Some(read_login(login)?), hosts),
            None => (None, authority),
        };
        let (path, query) = behind.split_once('?').unwrap_or((behind, ""));
        let mut options = Options::read(query, scheme)?;
        let wire = options.wire()?;
        let (leads, login, database) = if scheme == Scheme::Socket {
            if !matches!(hosts, "" | "localhost") {
                return refuse(
                    "a socket has no host; write redis+unix://user:password@/path/to/socket",
                );
            }
            let database = options.take("db");
            let database = database.as_deref().map_or(Ok(None), read_database)?;
            (read_socket(path)?, options.login_beside(login)?, database)
        } else {
            let path = path.strip_prefix('/').unwrap_or(path);
            let (leads, database) = options.servers(scheme, hosts, path)?;
            (leads, login, read_database(database)?)
        };
        Ok(Self {
            leads,
            login,
            database,
            wire,
            is_secret,
        })
    }
}

/// Reads the scheme, and whether it uses TLS.
fn read_scheme(name: &str) -> Result<(Scheme, bool)> {
    let (scheme, is_secret) = match name {
        "redis+unix" | "valkey+unix" => (Scheme::Socket, false),
        "redis" | "valkey" => (Scheme::Server, false),
        "rediss" | "valkeys" => (Scheme::Server, true),
        "redis-cluster" | "valkey-cluster" => (Scheme::Cluster, false),
        "rediss-cluster" | "valkeys-cluster" => (Scheme::Cluster, true),
        "redis-sentinel" | "valkey-sentinel" => (Scheme::Sentinel, false),
        "rediss-sentinel" | "valkeys-sentinel" => (Scheme::Sentinel, true),
        _ => return refuse(format!("nestlock has no such scheme; {FORMS}")),
    };
    if is_secret && !cfg!(feature = "rustls") {
        return refuse(format!(
            "{name}:// needs TLS; enable the feature `rustls` of nestlock"
        ));
    }
    Ok((scheme, is_secret))
}

/// Rejects characters that must be percent-encoded. `behind`: the part after the addresses.
/// `is_path`: that part is the path of a socket, in which no login can end.
fn refuse_unencoded(rest: &str, behind: &str, is_path: bool) -> Result<()> {
    if let Some(blank) = rest.chars().find(|c| c.is_whitespace() || c.is_control()) {
        return refuse(format!(
            "the URL contains {blank:?}; leave it out, or {}",
            percent_encode(blank, "the URL")
        ));
    }
    if let Some(end) = behind.chars().next()
        && behind.contains('@')
        && !is_path
    {
        let password = percent_encode(end, "the password");
        return refuse(format!(
            "the URL has an `@` after `{end}`; {password}, or, after the address, `@` as %40"
        ));
    }
    if behind.contains('#') {
        return refuse(format!(
            "the URL has a fragment, which has no meaning; {}",
            percent_encode('#', "the URL")
        ));
    }
    Ok(())
}

/// Reads the path of a socket.
fn read_socket(path: &str) -> Result<Leads> {
    let path = decoded("the path", path)?;
    // other clients read `/a/../b` as `/b`, which may be another socket
    if path.len() < 2
        || path.contains('\0')
        || path.split('/').any(|name| matches!(name, "." | ".."))
    {
        return refuse(
            "the path must be that of a socket, without `.` and `..`; write redis+unix:///path/to/socket",
        );
    }
    Ok(Leads::Socket(path.into()))
}

/// The options after `?`, decoded.
struct Options(Vec<(String, String)>);

impl Options {
    /// Rejects options that this scheme does not have, and duplicates.
    fn read(query: &str, scheme: Scheme) -> Result<Self> {
        let known: &[&str] = match scheme {
            Scheme::Server | Scheme::Cluster => &["wire", "node"],
            Scheme::Sentinel => &[
                "wire",
                "node",
                "sentinelServiceName",
                "sentinelUsername",
                "sentinelPassword",
            ],
            Scheme::Socket => &["wire", "db", "user", "pass"],
        };
        let mut options: Vec<(String, String)> = Vec::new();
        for option in query.split('&').filter(|_| !query.is_empty()) {
            let (name, value) = option.split_once('=').unwrap_or((option, ""));
            if !known.contains(&name) {
                let known = known.join("=, ");
                return refuse(format!(
                    "the URL has an option after `?` that is none of {known}="
                ));
            }
            if name != "node" && options.iter().any(|(known, _)| known == name) {
                return refuse(format!("the option `{name}` is given twice; leave one out"));
            }
            let what = format!("the option `{name}`");
            if value.is_empty() {
                return refuse(format!("{what} has no value"));
            }
            if value.contains('+') {
                // other clients read it as a space
                return refuse(percent_encode('+', &what));
            }
            options.push((name.to_owned(), decoded(&what, value)?));
        }
        Ok(Self(options))
    }

    /// Takes the option `wire`: the client that carries requests.
    fn wire(&mut self) -> Result<Option<Wire>> {
        match self.take("wire").as_deref() {
            None => Ok(None),
            Some("own") => Ok(Some(Wire::Own)),
            #[cfg(feature = "fred")]
            Some("fred") => Ok(Some(Wire::Fred)),
            #[cfg(not(feature = "fred"))]
            Some("fred") => {
                refuse("wire=fred needs fred's client; enable the feature `fred` of nestlock")
            }
            Some(_) => refuse("the option `wire` must be own or fred"),
        }
    }

    /// Takes the login of a socket. `login`: the one before `@`.
    fn login_beside(&mut self, login: Option<Login>) -> Result<Option<Login>> {
        let own = login_of(self.take("user"), self.take("pass"))?;
        if login.is_some() && own.is_some() {
            return refuse("the login is given twice, before `@` and after `?`; leave one out");
        }
        Ok(login.or(own))
    }

    /// Reads the addresses and, from the path, the service. Also returns the rest of the path,
    /// which is the database.
    fn servers<'p>(
        &mut self,
        scheme: Scheme,
        hosts: &str,
        path: &'p str,
    ) -> Result<(Leads, &'p str)> {
        let port = if scheme == Scheme::Sentinel {
            26379
        } else {
            6379
        };
        let mut at = hosts
            .split(',')
            .map(|host| read_address(host, port))
            .collect::<Result<Vec<_>>>()?;
        while let Some(node) = self.take("node") {
            at.push(read_address(&node, port)?);
        }
        match scheme {
            Scheme::Cluster => return Ok((Leads::Cluster(at), path)),
            Scheme::Server | Scheme::Socket => return Ok((Leads::Servers(at), path)),
            Scheme::Sentinel => {}
        }
        let (service, database) = if let Some(service) = self.take("sentinelServiceName") {
            // as in fred's URLs: the path is only the database
            (service, path)
        } else {
            let (service, database) = path.split_once('/').unwrap_or((path, ""));
            (decoded("the name of the service", service)?, database)
        };
        if service.is_empty() {
            return refuse(
                "the URL names no service; write it after the addresses: redis-sentinel://a,b,c/name",
            );
        }
        let (user, password) = (self.take("sentinelUsername"), self.take("sentinelPassword"));
        let login = login_of(user, password)?;
        Ok((Leads::Sentinels { at, service, login }, database))
    }

    /// Removes and returns the first option of this name.
    fn take(&mut self, name: &str) -> Option<String> {
        let at = self.0.iter().position(|(known, _)| known == name)?;
        Some(self.0.remove(at).1)
    }
}

/// Reads user and password, the part before `@`.
fn read_login(login: &str) -> Result<Login> {
    let (user, password) = login.split_once(':').unwrap_or((login, ""));
    let read = |part: &str, what: &str| match part.chars().find(|c| matches!(c, '@' | '[' | ']')) {
        Some(reserved) => refuse(percent_encode(reserved, what)),
        None => Ok(Some(decoded(what, part)?).filter(|part| !part.is_empty())),
    };
    let (user, password) = (read(user, "the user")?, read(password, "the password")?);
    match login_of(user, password)? {
        Some(login) => Ok(login),
        None => refuse("the login before `@` is empty; leave out the `@`"),
    }
}

pub(super) fn login_of(user: Option<String>, password: Option<String>) -> Result<Option<Login>> {
    match (&user, &password) {
        (None, None) => Ok(None),
        (Some(_), None) => refuse(
            "the password is missing; write user:password@, or :password@ for the user `default`; if the user has none, write any \
             password",
        ),
        _ => Ok(Some(Login { user, password })),
    }
}

fn read_address(address: &str, default: u16) -> Result<Server> {
    let (host, port) = if let Some(rest) = address.strip_prefix('[') {
        let read = |(ip, port): (&str, _)| Some((ip.parse::<Ipv6Addr>().ok()?, port));
        match rest.split_once(']').and_then(read) {
            Some((ip, port)) => (format!("[{ip}]"), port),
            None => return refuse("the host between [ and ] must be an IPv6 address"),
        }
    } else {
        let (host, port) = address.split_at(address.find(':').unwrap_or(address.len()));
        if host.is_empty() {
            return refuse("the URL names no host, or an address between commas is empty");
        }
        if !host
            .bytes()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, b'.' | b'-' | b'_'))
        {
            return refuse(
                "the host must be a name of ASCII letters, digits, `.`, `-` and `_`, an IPv4 address, or an IPv6 address \
                 between [ and ]",
            );
        }
        (host.to_owned(), port)
    };
    let port = match port.strip_prefix(':') {
        None if port.is_empty() => Some(default),
        None => None,
        Some(port) => number(port).filter(|port| *port > 0),
    };
    match port {
        Some(port) => Ok(Server::new(host, port)),
        None => refuse(
            "the port must be a number from 1 to 65535; an IPv6 address must be in brackets: [::1]",
        ),
    }
}

fn read_database(database: &str) -> Result<Option<u8>> {
    if database.is_empty() {
        return Ok(None);
    }
    match number(database) {
        Some(database) => Ok(Some(database)),
        None => refuse("the database must be a number from 0 to 255"),
    }
}

/// Parses a number that consists only of digits: `parse` alone would accept `+1`.
fn number<N: std::str::FromStr>(text: &str) -> Option<N> {
    text.bytes()
        .all(|c| c.is_ascii_digit())
        .then(|| text.parse().ok())?
}

/// Decodes percent-encoding. `what` names the part in errors.
fn decoded(what: &str, text: &str) -> Result<String> {
    let mut pieces = text.split('%');
    let mut bytes = pieces.next().unwrap_or_default().as_bytes().to_vec();
    for piece in pieces {
        let hex = piece
            .get(..2)
            .filter(|hex| hex.bytes().all(|c| c.is_ascii_hexdigit()));
        let Some(byte) = hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) else {
            return refuse(percent_encode('%', what));
        };
        bytes.push(byte);
        bytes.extend_from_slice(&piece.as_bytes()[2..]);
    }
    String::from_utf8(bytes).or_else(|_| refuse(format!("{what} must be UTF-8 once it is decoded")))
}

/// Returns the advice to percent-encode a character in this part.
fn percent_encode(c: char, what: &str) -> String {
    let mut advice = format!("percent-encode `{}` in {what} as ", c.escape_default());
    for byte in c.encode_utf8(&mut [0; 4]).bytes() {
        let _ = write!(advice, "%{byte:02X}");
    }
    advice
}
