//! Pub/sub commands.

use indexmap::IndexSet;

use super::{
    call::Call,
    error_text::{shortened, text},
    glob::glob,
};
use crate::server::{
    client::Subscriptions,
    resp::{Outcome, Reply, Text},
};

/// One of the three kinds of subscription.
#[derive(Clone, Copy)]
struct Kind {
    subscribe: &'static str,
    unsubscribe: &'static str,
    of: fn(&mut Subscriptions) -> &mut IndexSet<Vec<u8>>,
    /// Returns the number of subscriptions that the confirmation reports.
    count: fn(&Subscriptions) -> usize,
}

const CHANNELS: Kind = Kind {
    subscribe: "subscribe",
    unsubscribe: "unsubscribe",
    of: |all| &mut all.channels,
    count: |all| all.channels.len() + all.patterns.len(),
};
const PATTERNS: Kind = Kind {
    subscribe: "psubscribe",
    unsubscribe: "punsubscribe",
    of: |all| &mut all.patterns,
    count: |all| all.channels.len() + all.patterns.len(),
};
const SHARDS: Kind = Kind {
    subscribe: "ssubscribe",
    unsubscribe: "sunsubscribe",
    of: |all| &mut all.shards,
    count: |all| all.shards.len(),
};

pub(super) fn subscribe(call: &mut Call) -> Outcome {
    enter(call, CHANNELS)
}

pub(super) fn psubscribe(call: &mut Call) -> Outcome {
    enter(call, PATTERNS)
}

pub(super) fn ssubscribe(call: &mut Call) -> Outcome {
    enter(call, SHARDS)
}

pub(super) fn unsubscribe(call: &mut Call) -> Outcome {
    leave(call, CHANNELS)
}

pub(super) fn punsubscribe(call: &mut Call) -> Outcome {
    leave(call, PATTERNS)
}

pub(super) fn sunsubscribe(call: &mut Call) -> Outcome {
    leave(call, SHARDS)
}

fn enter(call: &mut Call, kind: Kind) -> Outcome {
    for name in &call.args[1..] {
        let Some(client) = call.server.clients.get_mut(&call.client) else {
            break;
        };
        (kind.of)(&mut client.subscriptions).insert(name.clone());
        confirm(call, kind.subscribe, Reply::bulk(name.as_slice()), kind);
    }
    Ok(Reply::Nothing)
}

fn leave(call: &mut Call, kind: Kind) -> Outcome {
    let Some(client) = call.server.clients.get_mut(&call.client) else {
        return Ok(Reply::Nothing);
    };
    let all = (kind.of)(&mut client.subscriptions);
    let left = if call.args.len() > 1 {
        call.args[1..].to_vec()
    } else {
        all.iter().cloned().collect()
    };
    if left.is_empty() {
        confirm(call, kind.unsubscribe, Reply::Nil, kind);
    }
    for name in left {
        let Some(client) = call.server.clients.get_mut(&call.client) else {
            break;
        };
        (kind.of)(&mut client.subscriptions).shift_remove(&name);
        confirm(call, kind.unsubscribe, Reply::Bulk(name), kind);
    }
    Ok(Reply::Nothing)
}

fn confirm(call: &mut Call, word: &'static str, name: Reply, kind: Kind) {
    let Some(client) = call.server.clients.get_mut(&call.client) else {
        return;
    };
    let count = Reply::len((kind.count)(&client.subscriptions));
    client.send(&Reply::Push(vec![Reply::bulk(word), name, count]));
}

fn message_of<const N: usize>(words: [&[u8]; N]) -> Vec<Reply> {
    words.into_iter().map(Reply::bulk).collect()
}

pub(super) fn publish(call: &mut Call) -> Outcome {
    let (channel, message) = (&call.args[1], &call.args[2]);
    let mut receivers = 0;
    for client in call.server.clients.values_mut() {
        if client.subscriptions.channels.contains(channel) {
            client.send(&Reply::Push(message_of([b"message", channel, message])));
            receivers += 1;
        }
        let fitting: Vec<_> = client
            .subscriptions
            .patterns
            .iter()
            .filter(|pattern| glob(pattern, channel))
            .cloned()
            .collect();
        for pattern in fitting {
            client.send(&Reply::Push(message_of([
                b"pmessage",
                &pattern,
                channel,
                message,
            ])));
            receivers += 1;
        }
    }
    Ok(Reply::Int(receivers))
}

pub(super) fn spublish(call: &mut Call) -> Outcome {
    let (channel, message) = (&call.args[1], &call.args[2]);
    let mut receivers = 0;
    for client in call
        .server
        .clients
        .values_mut()
        .filter(|client| client.subscriptions.shards.contains(channel))
    {
        client.send(&Reply::Push(message_of([b"smessage", channel, message])));
        receivers += 1;
    }
    Ok(Reply::Int(receivers))
}

pub(super) fn channels(call: &mut Call) -> Outcome {
    names(call, |all| &all.channels)
}

pub(super) fn shardchannels(call: &mut Call) -> Outcome {
    names(call, |all| &all.shards)
}

fn names(call: &mut Call, of: fn(&Subscriptions) -> &IndexSet<Vec<u8>>) -> Outcome {
    if call.args.len() > 3 {
        return Err(help(call));
    }
    let mut names: Vec<&Vec<u8>> = call
        .server
        .clients
        .values()
        .flat_map(|client| of(&client.subscriptions))
        .collect();
    names.sort_unstable();
    names.dedup();
    let fits = |name: &&&Vec<u8>| call.args.get(2).is_none_or(|pattern| glob(pattern, name));
    Ok(Reply::list(
        names
            .iter()
            .filter(fits)
            .map(|name| Reply::bulk(name.as_slice())),
    ))
}

fn help(call: &Call) -> Text {
    let word = shortened(&call.args[1], 128);
    text([
        b"ERR unknown subcommand or wrong number of arguments for '",
        word,
        b"'. Try PUBSUB HELP.",
    ])
}

pub(super) fn numsub(call: &mut Call) -> Outcome {
    numbers(call, |all| &all.channels)
}

pub(super) fn shardnumsub(call: &mut Call) -> Outcome {
    numbers(call, |all| &all.shards)
}

fn numbers(call: &mut Call, of: fn(&Subscriptions) -> &IndexSet<Vec<u8>>) -> Outcome {
    let count = |name| {
        call.server
            .clients
            .values()
            .filter(|client| of(&client.subscriptions).contains(name))
            .count()
    };
    Ok(Reply::list(call.args[2..].iter().flat_map(|name| {
        [Reply::bulk(name.as_slice()), Reply::len(count(name))]
    })))
}

pub(super) fn numpat(call: &mut Call) -> Outcome {
    // a pattern counts once, however many clients subscribe to it
    let patterns = call
        .server
        .clients
        .values()
        .flat_map(|client| &client.subscriptions.patterns);
    Ok(Reply::len(
        patterns.collect::<std::collections::BTreeSet<_>>().len(),
    ))
}
