//! Connection commands.

use super::{
    call::Call,
    error_text::{SYNTAX, shortened, text},
};
use crate::server::{
    client::{Client, Fate},
    keyspace::DATABASES,
    resp::{Outcome, Protocol, Reply, Text, integer},
    state::PauseMode,
};

/// The version that the emulated server reports to clients.
pub(crate) const VERSION: &str = "7.0.15";

pub(super) fn ping(call: &mut Call) -> Outcome {
    if call.args.len() > 2 {
        return Err(call.wrong_number().into());
    }
    let payload = call
        .args
        .get(1)
        .map(|payload| Reply::bulk(payload.as_slice()));
    if !call.in_script && call.client_mut().only_subscribes() {
        return Ok(Reply::list([
            Reply::bulk("pong"),
            payload.unwrap_or(Reply::bulk("")),
        ]));
    }
    Ok(payload.unwrap_or(Reply::Status("PONG".into())))
}

pub(super) fn echo(call: &mut Call) -> Outcome {
    Ok(Reply::bulk(call.args[1].as_slice()))
}

pub(super) fn select(call: &mut Call) -> Outcome {
    let number = call.int(1)?;
    if i32::try_from(number).is_err() {
        return Err(
            "ERR value is out of range, value must between -2147483648 and 2147483647".into(),
        );
    }
    let db = usize::try_from(number).ok().filter(|db| *db < DATABASES);
    call.db = db.ok_or("ERR DB index is out of range")?;
    Ok(Reply::OK)
}

pub(super) fn quit(call: &mut Call) -> Outcome {
    call.client_mut().end(Fate::Ending);
    Ok(Reply::OK)
}

pub(super) fn reset(call: &mut Call) -> Outcome {
    call.db = 0;
    let now = call.server.clock.now();
    let client = call.client_mut();
    *client = Client {
        connected: client.connected,
        output: std::mem::take(&mut client.output),
        wake: client.wake.clone(),
        ..Client::new(client.id, client.peer, client.local, now)
    };
    Ok(Reply::Status("RESET".into()))
}

/// Checks a login. The only user is `default`, and any password is accepted.
fn check_password(user: &[u8]) -> Result<(), String> {
    if user == b"default" {
        Ok(())
    } else {
        Err("WRONGPASS invalid username-password pair or user is disabled.".into())
    }
}

pub(super) fn auth(call: &mut Call) -> Outcome {
    match call.args.len() {
        2 => Err("ERR AUTH <password> called without any password configured for the default user. Are you sure your \
                  configuration is correct?"
            .into()),
        3 => Ok(check_password(&call.args[1]).map(|()| Reply::OK)?),
        _ => Err(SYNTAX.into()),
    }
}

pub(super) fn hello(call: &mut Call) -> Outcome {
    let mut protocol = None;
    if let Some(version) = call.args.get(1) {
        let version =
            integer(version).ok_or("ERR Protocol version is not an integer or out of range")?;
        protocol = Some(match version {
            2 => Protocol::Resp2,
            3 => Protocol::Resp3,
            _ => return Err("NOPROTO unsupported protocol version".into()),
        });
    }
    let mut at = 2;
    // each option takes effect at once, even if a later one is refused
    while at < call.args.len() {
        let left = call.args.len() - at - 1;
        if call.is(at, "auth") && left >= 2 {
            check_password(&call.args[at + 1])?;
            at += 3;
        } else if call.is(at, "setname") && left >= 1 {
            check_name(&call.args[at + 1])?;
            call.client_mut().name = call.args[at + 1].clone();
            at += 2;
        } else {
            return Err(text([
                b"ERR Syntax error in HELLO option '",
                shortened(&call.args[at], usize::MAX),
                b"'",
            ]));
        }
    }
    let client = call.client_mut();
    if let Some(protocol) = protocol {
        client.protocol = protocol;
    }
    let proto = if client.protocol == Protocol::Resp3 {
        3
    } else {
        2
    };
    let id = i64::try_from(client.id).unwrap_or(i64::MAX);
    let pairs = [
        ("server", Reply::bulk("redis")),
        ("version", Reply::bulk(VERSION)),
        ("proto", Reply::Int(proto)),
        ("id", Reply::Int(id)),
        ("mode", Reply::bulk("standalone")),
        ("role", Reply::bulk("master")),
        ("modules", Reply::List(Vec::new())),
    ];
    Ok(Reply::Map(
        pairs
            .into_iter()
            .map(|(key, value)| (Reply::bulk(key), value))
            .collect(),
    ))
}

fn check_name(name: &[u8]) -> Result<(), String> {
    if name.iter().all(|byte| (b'!'..=b'~').contains(byte)) {
        Ok(())
    } else {
        Err("ERR Client names cannot contain spaces, newlines or special characters.".into())
    }
}

pub(super) fn client_id(call: &mut Call) -> Outcome {
    Ok(Reply::Int(i64::try_from(call.client).unwrap_or(i64::MAX)))
}

pub(super) fn client_getname(call: &mut Call) -> Outcome {
    let name = call.client_mut().name.clone();
    Ok(if name.is_empty() {
        Reply::Nil
    } else {
        Reply::Bulk(name)
    })
}

pub(super) fn client_setname(call: &mut Call) -> Outcome {
    check_name(&call.args[2])?;
    let name = call.args[2].clone();
    call.client_mut().name = name;
    Ok(Reply::OK)
}

/// Accepts CLIENT SETINFO. Redis 7.0 does not have it, but newer clients send it by default.
pub(super) fn client_setinfo(call: &mut Call) -> Outcome {
    if call.is(2, "lib-name") || call.is(2, "lib-ver") {
        Ok(Reply::OK)
    } else {
        Err(text([
            b"ERR Unrecognized option '",
            shortened(&call.args[2], usize::MAX),
            b"'",
        ]))
    }
}

/// Accepts CLIENT NO-EVICT, which has no effect: the server never evicts anything.
pub(super) fn client_no_evict(call: &mut Call) -> Outcome {
    if call.is(2, "on") || call.is(2, "off") {
        Ok(Reply::OK)
    } else {
        Err(SYNTAX.into())
    }
}

pub(super) fn client_info(call: &mut Call) -> Outcome {
    let now = call.server.clock.now();
    Ok(Reply::Verbatim(
        call.client_mut().describe(now).into_bytes(),
    ))
}

/// Returns whether a client is of a type, as CLIENT LIST and CLIENT KILL name it.
fn is_of_type(client: &Client, name: &str) -> bool {
    match name {
        "pubsub" => !client.subscriptions.is_empty(),
        "normal" => client.subscriptions.is_empty() && !client.monitors,
        _ => false,
    }
}

fn type_name(word: &[u8]) -> Result<String, Text> {
    let name = String::from_utf8_lossy(word).to_ascii_lowercase();
    if ["normal", "pubsub", "master", "replica", "slave"].contains(&name.as_str()) {
        Ok(name)
    } else {
        Err(text([
            b"ERR Unknown client type '",
            shortened(word, usize::MAX),
            b"'",
        ]))
    }
}

pub(super) fn client_list(call: &mut Call) -> Outcome {
    let now = call.server.clock.now();
    let clients = call.server.clients.values();
    let text: String = match call.args.len() {
        2 => clients.map(|client| client.describe(now)).collect(),
        4 if call.is(2, "type") => {
            let name = type_name(&call.args[3])?;
            clients
                .filter(|client| is_of_type(client, &name))
                .map(|client| client.describe(now))
                .collect()
        }
        4.. if call.is(2, "id") => {
            let id = |word: &Vec<u8>| {
                integer(word)
                    .and_then(|id| u64::try_from(id).ok())
                    .ok_or("ERR Invalid client ID")
            };
            let ids = call.args[3..]
                .iter()
                .map(id)
                .collect::<Result<Vec<_>, _>>()?;
            let found = ids.iter().filter_map(|id| call.server.clients.get(id));
            found.map(|client| client.describe(now)).collect()
        }
        _ => return Err(SYNTAX.into()),
    };
    Ok(Reply::Verbatim(text.into_bytes()))
}

pub(super) fn client_kill(call: &mut Call) -> Outcome {
    let me = call.client;
    if call.args.len() == 3 {
        let found = call
            .server
            .clients
            .values()
            .find(|client| client.peer.to_string().as_bytes() == call.args[2]);
        let id = found.map(|client| client.id).ok_or("ERR No such client")?;
        kill(call, id);
        return Ok(Reply::OK);
    }
    if call.args.len() % 2 == 1 {
        return Err(SYNTAX.into());
    }
    let mut doomed: Vec<u64> = call.server.clients.keys().copied().collect();
    let mut skip_me = true;
    for at in (2..call.args.len()).step_by(2) {
        let value = &call.args[at + 1];
        let keep: Box<dyn Fn(&Client) -> bool> = if call.is(at, "id") {
            let id = integer(value)
                .and_then(|id| u64::try_from(id).ok())
                .filter(|id| *id > 0);
            let id = id.ok_or("ERR client-id should be greater than 0")?;
            Box::new(move |client| client.id == id)
        } else if call.is(at, "type") {
            let name = type_name(value)?;
            Box::new(move |client| is_of_type(client, &name))
        } else if call.is(at, "addr") {
            Box::new(move |client| client.peer.to_string().as_bytes() == value)
        } else if call.is(at, "laddr") {
            Box::new(move |client| client.local.to_string().as_bytes() == value)
        } else if call.is(at, "user") {
            if value != b"default" {
                return Err(text([
                    b"ERR No such user '",
                    shortened(value, usize::MAX),
                    b"'",
                ]));
            }
            Box::new(|_| true)
        } else if call.is(at, "skipme") && (call.is(at + 1, "yes") || call.is(at + 1, "no")) {
            skip_me = call.is(at + 1, "yes");
            continue;
        } else {
            return Err(SYNTAX.into());
        };
        doomed.retain(|id| call.server.clients.get(id).is_some_and(&keep));
    }
    doomed.retain(|id| !skip_me || *id != me);
    let count = doomed.len();
    for id in doomed {
        kill(call, id);
    }
    Ok(Reply::len(count))
}

fn kill(call: &mut Call, id: u64) {
    let fate = if id == call.client {
        Fate::Ending
    } else {
        Fate::Ended
    };
    if let Some(client) = call.server.clients.get_mut(&id) {
        client.end(fate);
    }
}

pub(super) fn client_pause(call: &mut Call) -> Outcome {
    let mode = match call
        .args
        .get(3)
        .map(|word| word.to_ascii_lowercase())
        .as_deref()
    {
        None | Some(b"all") => PauseMode::All,
        Some(b"write") => PauseMode::Write,
        Some(_) => return Err("ERR CLIENT PAUSE mode must be WRITE or ALL".into()),
    };
    if call.args.len() > 4 {
        return Err(SYNTAX.into());
    }
    let timeout = integer(&call.args[2]).ok_or("ERR timeout is not an integer or out of range")?;
    let timeout = u64::try_from(timeout).map_err(|_| "ERR timeout is negative")?;
    let until = call.server.clock.now() + std::time::Duration::from_millis(timeout);
    call.server.pause_clients(until, mode);
    Ok(Reply::OK)
}

pub(super) fn client_unpause(call: &mut Call) -> Outcome {
    call.server.unpause_clients();
    Ok(Reply::OK)
}
