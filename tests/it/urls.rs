//! A URL is parsed completely or refused, and never parsed differently from other clients.

use nestlock::{
    Error, LockClient,
    fred::types::config::{Config as FredConfig, ServerConfig},
};
use proptest::{
    prelude::*,
    test_runner::{Config, RngSeed, TestRunner},
};
use redis::{ConnectionAddr, IntoConnectionInfo};

/// The contents of a URL: host and port, or a path; user, password and database.
#[derive(Debug, PartialEq, Eq)]
struct Said {
    host: String,
    port: u16,
    user: Option<String>,
    password: Option<String>,
    database: i64,
}

fn bare(host: &str) -> String {
    let bare = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(host);
    bare.parse::<std::net::IpAddr>()
        .map_or(bare.to_owned(), |ip| ip.to_string())
}

fn said(config: FredConfig) -> Said {
    let (host, port) = match config.server {
        ServerConfig::Unix { path } => (path.display().to_string(), 0),
        other => other
            .hosts()
            .first()
            .map(|server| (bare(&server.host), server.port))
            .unwrap(),
    };
    let database = config.database.unwrap_or(0).into();
    Said {
        host,
        port,
        user: config.username,
        password: config.password,
        database,
    }
}

fn ours(url: &str) -> Result<Said, String> {
    match LockClient::builder().fred_config(url, None) {
        Ok(config) => Ok(said(config)),
        Err(Error::InvalidConfig { reason, .. }) => Err(reason),
        Err(other) => panic!("{url:?}: {other:?}"),
    }
}

/// Parses a URL as fred's client does. The path of a socket is decoded here, as fred leaves it
/// percent-encoded.
fn freds(url: &str) -> Option<Said> {
    let mut config = FredConfig::from_url(&url.replacen("valkey", "redis", 1)).ok()?;
    if let ServerConfig::Unix { path } = &mut config.server {
        *path = percent_encoding::percent_decode_str(path.to_str()?)
            .decode_utf8()
            .ok()?
            .into_owned()
            .into();
    }
    Some(said(config))
}

fn redis_rs(url: &str) -> Option<Said> {
    let info = url.into_connection_info().ok()?;
    let (host, port) = match info.addr() {
        ConnectionAddr::Tcp(host, port) => (bare(host), *port),
        ConnectionAddr::Unix(path) => (path.display().to_string(), 0),
        _ => return None,
    };
    let settings = info.redis_settings();
    let (user, password) = (settings.username(), settings.password());
    let database = settings.db();
    Some(Said {
        host,
        port,
        user: user.map(Into::into),
        password: password.map(Into::into),
        database,
    })
}

fn is_read(url: &str, host: &str, port: u16, login: (&str, &str), database: i64) {
    let word = |word: &str| Some(word.to_owned()).filter(|word| !word.is_empty());
    let expected = Said {
        host: host.into(),
        port,
        user: word(login.0),
        password: word(login.1),
        database,
    };
    assert_eq!(ours(url).as_ref(), Ok(&expected), "{url}");
}

/// Returns how another client parses the URL, if it differs. The others do not support lists of
/// addresses.
fn differs(url: &str) -> Option<String> {
    let ours = ours(url).ok()?;
    let (scheme, rest) = url.split_once("://")?;
    let (before, query) = rest.split_once('?').unwrap_or((rest, ""));
    let authority = before.split('/').next()?;
    let is_socket = scheme.ends_with("unix");
    let mut readings = Vec::new();
    // fred knows no options of a socket, and its first node is not the URL's
    let is_strange =
        authority.contains(',') || is_socket && !query.is_empty() || query.contains("node=");
    if !is_strange {
        let mut freds = freds(url);
        if let Some(said) = freds.as_mut().filter(|_| scheme.ends_with("-cluster")) {
            // fred has only one database in a cluster
            said.database = ours.database;
        }
        readings.push(("fred", freds));
    }
    // redis-rs reads the login of a socket only after `?`, and takes `x:` and `x|` for a drive
    if !authority.contains(',')
        && !(is_socket && (authority.contains('@') || before.ends_with([':', '|'])))
    {
        readings.push(("redis-rs", redis_rs(url)));
    }
    let other = |(who, theirs): (&str, Option<Said>)| {
        theirs
            .filter(|theirs| *theirs != ours)
            .map(|theirs| format!("{who}: {theirs:?}, and not {ours:?}"))
    };
    readings.into_iter().find_map(other)
}

fn runner(cases: u32) -> TestRunner {
    TestRunner::new(Config {
        cases,
        rng_seed: RngSeed::Fixed(9),
        failure_persistence: None,
        ..Config::default()
    })
}

/// Any string is either refused, or parsed as redis-rs and fred parse it if they accept it.
#[test]
fn what_others_read_is_read_alike_or_refused() {
    const SCHEMES: &[&str] = &[
        "redis://",
        "redis://",
        "redis://",
        "valkey://",
        "rediss://",
        "redis-cluster://",
        "redis-sentinel://",
        "redis+unix://",
        "redis+unix:///",
        "",
    ];
    const PIECES: &[&str] = &[
        "u",
        "p",
        "1",
        "12",
        "0",
        "@",
        ":",
        "/",
        "?",
        "#",
        "%",
        "%40",
        "%2F",
        "%2",
        "%zz",
        "%C3",
        "[",
        "]",
        "[::1]",
        ",",
        "&",
        "=",
        ";",
        "+",
        " ",
        "\t",
        "\n",
        "\\",
        "ä",
        "~",
        "!",
        "\u{a0}",
        "localhost",
        "a.b",
        "127.0.0.1",
        "6379",
        "65536",
        ":1@h",
        "u:p@",
        ":p@",
        "/3",
        "?db=4",
        "?node=c:3",
        "&user=x",
        "pass=y",
        "wire=own",
        "sentinelServiceName=s",
        "redis://",
        "..",
        "%00",
        "^",
        "|",
        "'",
        "\"",
    ];
    let strategy = (
        0..SCHEMES.len(),
        prop::collection::vec(0..PIECES.len(), 0..9),
    );
    let (mut read, mut refused) = (0, 0);
    let test = |(scheme, pieces): (usize, Vec<usize>)| {
        let url: String = [SCHEMES[scheme]]
            .into_iter()
            .chain(pieces.into_iter().map(|piece| PIECES[piece]))
            .collect();
        match ours(&url) {
            Ok(_) => read += 1,
            Err(reason) => {
                refused += 1;
                assert!(!reason.contains("Url Error"), "{url:?}: {reason}");
            }
        }
        match differs(&url) {
            None => Ok(()),
            Some(how) => Err(TestCaseError::fail(format!("{url:?}: {how}"))),
        }
    };
    let test = std::cell::RefCell::new(test);
    runner(50_000)
        .run(&strategy, |input| (test.borrow_mut())(input))
        .unwrap();
    assert!(
        read > 1_000 && refused > 10_000,
        "it compares nothing: {read} read, {refused} refused"
    );
}

/// Any string is either refused, or parsed as redis-py parses it if that accepts it;
/// `urls/redis_py.py` wrote the expected results.
#[test]
fn what_redis_py_reads_is_read_alike_or_refused() {
    let mut read = 0;
    for line in include_str!("urls/redis_py.tsv").lines() {
        let [url, host, port, user, password, database] = line.split('\t').collect::<Vec<_>>()[..]
        else {
            panic!("{line:?}")
        };
        if ours(url).is_ok() {
            is_read(
                url,
                &bare(host),
                port.parse().unwrap(),
                (user, password),
                database.parse().unwrap(),
            );
            read += 1;
        }
    }
    assert!(read > 50, "it compares nothing: {read} read");
}

/// Percent-encoded users, passwords and paths are decoded to their exact text.
#[test]
fn what_is_percent_encoded_is_read_as_it_is() {
    let encoded = |text: &str| {
        text.bytes()
            .fold(String::new(), |text, byte| text + &format!("%{byte:02x}"))
    };
    let strategy = (any::<String>(), "\\PC{1,12}", 1..u16::MAX, any::<u8>());
    runner(2_000)
        .run(&strategy, |(user, password, port, database)| {
            let (user_is, password_is) = (encoded(&user), encoded(&password));
            for form in [
                "redis://{}a.b:{}/{}",
                "redis-cluster://{}a.b:{}/{}",
                "redis-sentinel://{}a.b:{}/x/{}",
            ] {
                let mut url = form.to_owned();
                for part in [
                    format!("{user_is}:{password_is}@"),
                    port.to_string(),
                    database.to_string(),
                ] {
                    url = url.replacen("{}", &part, 1);
                }
                is_read(&url, "a.b", port, (&user, &password), database.into());
            }
            let url = format!("redis+unix://{user_is}:{password_is}@/run/%73?db={database}");
            is_read(&url, "/run/s", 0, (&user, &password), database.into());
            Ok(())
        })
        .unwrap();
}

#[test]
fn each_part_of_each_form_is_read() {
    for (url, host, port, login, database) in [
        ("redis://h", "h", 6379, ("", ""), 0),
        ("redis://h/", "h", 6379, ("", ""), 0),
        ("redis://u:p@h:7/3", "h", 7, ("u", "p"), 3),
        (
            "redis://:p:q!$&'()*+,;=~^|@h",
            "h",
            6379,
            ("", "p:q!$&'()*+,;=~^|"),
            0,
        ),
        ("valkey://u:p@[::1]:7/255", "::1", 7, ("u", "p"), 255),
        (
            "rediss://u:p%40%23%2F@h_1:07/03",
            "h_1",
            7,
            ("u", "p@#/"),
            3,
        ),
        ("redis://u:p@a:1,b/3", "a", 1, ("u", "p"), 3),
        ("redis://u:p@a:1/3?node=b:2&wire=own", "a", 1, ("u", "p"), 3),
        ("redis-cluster://u:p@a:1,b", "a", 1, ("u", "p"), 0),
        (
            "redis-sentinel://u:p@a,b:2/my%2Fs/3",
            "a",
            26379,
            ("u", "p"),
            3,
        ),
        // fred's form
        (
            "redis-sentinel://u:p@a/3?sentinelServiceName=my",
            "a",
            26379,
            ("u", "p"),
            3,
        ),
        (
            "redis+unix:///run/a@b:c%20d",
            "/run/a@b:c d",
            0,
            ("", ""),
            0,
        ),
        ("redis+unix://u:p@/run/s?db=3", "/run/s", 0, ("u", "p"), 3),
        (
            "redis+unix://u:p@localhost/run/s",
            "/run/s",
            0,
            ("u", "p"),
            0,
        ),
        // redis-rs's form
        (
            "valkey+unix:///run/s?db=3&user=u&pass=p",
            "/run/s",
            0,
            ("u", "p"),
            3,
        ),
    ] {
        is_read(url, host, port, login, database);
    }
}

/// Refused URLs with their error texts, which contain nothing that may be a password.
#[test]
fn what_is_refused_names_the_part() {
    for (url, words) in [
        (
            "redis://u:12#s3cret@h/3",
            "percent-encode `#` in the password as %23",
        ),
        (
            "redis://u:12/s3cret@h/3",
            "percent-encode `/` in the password as %2F",
        ),
        (
            "redis://u:12?s3cret@h/3",
            "percent-encode `?` in the password as %3F",
        ),
        (
            "redis://u:12@s3cret@h/3",
            "percent-encode `@` in the password as %40",
        ),
        (
            "redis://u:s3cret]@h/3",
            "percent-encode `]` in the password as %5D",
        ),
        (
            "redis://u:s3cret%@h/3",
            "percent-encode `%` in the password as %25",
        ),
        (
            "redis://u:s3cret%F@h/3",
            "percent-encode `%` in the password as %25",
        ),
        ("redis://u:s3cret%ff@h/3", "the password must be UTF-8"),
        (
            "redis://s3cret%@h/3",
            "percent-encode `%` in the user as %25",
        ),
        (
            "redis://u:s3cret x@h",
            "percent-encode ` ` in the URL as %20",
        ),
        ("redis://u:s3cret@h\n", "leave it out"),
        ("redis://u:s3cret@h/3#x", "the URL has a fragment"),
        ("redis://s3cret@h", "the password is missing"),
        ("redis://s3cret:@h", "the password is missing"),
        ("redis://:@h", "the login before `@` is empty"),
        ("redis://@h", "the login before `@` is empty"),
        ("redis://u:s3cret@", "names no host"),
        ("redis:///3", "names no host"),
        ("redis://a,,b", "names no host"),
        ("redis://u:s3cret@a,u:s3cret@b", "percent-encode `@`"),
        ("redis://h%41", "the host must be"),
        ("redis://hä", "the host must be"),
        (
            "redis://[::1",
            "the host between [ and ] must be an IPv6 address",
        ),
        (
            "redis://[s3cret",
            "the host between [ and ] must be an IPv6 address",
        ),
        (
            "redis://[::1]1",
            "the port must be a number from 1 to 65535",
        ),
        (
            "redis://u:s3cret",
            "the port must be a number from 1 to 65535",
        ),
        ("redis://h:", "the port must be a number from 1 to 65535"),
        ("redis://h:0", "the port must be a number from 1 to 65535"),
        ("redis://h:+1", "the port must be a number from 1 to 65535"),
        (
            "redis://h:65536",
            "the port must be a number from 1 to 65535",
        ),
        ("redis://::1", "names no host"),
        ("redis://fe80::1", "an IPv6 address must be in brackets"),
        ("redis://h/x", "the database must be a number from 0 to 255"),
        ("redis://h/+3", "the database must be a number"),
        ("redis://h/256", "the database must be a number"),
        ("redis://h/3/", "the database must be a number"),
        ("redis-sentinel://h/my/x", "the database must be a number"),
        (
            "redis-sentinel://h/my/3?sentinelServiceName=other",
            "the database must be a number",
        ),
        ("redis-sentinel://h", "names no service"),
        (
            "redis-sentinel://h/my?sentinelPassword=s3cret+x",
            "percent-encode `+` in the option `sentinelPassword` as %2B",
        ),
        (
            "redis-sentinel://h/my?sentinelUsername=u",
            "the password is missing",
        ),
        ("redis://h?sentinelPassword=s3cret", "none of wire=, node="),
        ("redis://h?db=3", "none of wire=, node="),
        (
            "redis://h?wire=own&wire=fred",
            "the option `wire` is given twice",
        ),
        (
            "redis://h?wire=s3cret",
            "the option `wire` must be own or fred",
        ),
        ("redis-cluster://h?node=", "the option `node` has no value"),
        ("redis-cluster://h?node=a:x", "the port must be a number"),
        ("redis://h/3?&", "none of wire=, node="),
        ("redis+unix://h/run/s", "a socket has no host"),
        ("redis+unix://", "the path must be that of a socket"),
        ("redis+unix:///run/s?db=x", "the database must be a number"),
        (
            "redis+unix://u:s3cret@/run/s?pass=s3cret",
            "the login is given twice",
        ),
        (
            "redis+unix:///run/s%00",
            "the path must be that of a socket",
        ),
        ("redis+unix:///run/%2e./s", "without `.` and `..`"),
        ("redis-clusters://h", "use redis://"),
        ("u:s3cret://x@h", "use redis://"),
        ("s3cret://h", "use redis://"),
        ("h:6379", "it is not a URL"),
    ] {
        let reason = ours(url).expect_err(url);
        assert!(reason.contains(words), "{url}: {reason}");
        assert!(!reason.contains("s3cret"), "{url}: {reason}");
    }
}
