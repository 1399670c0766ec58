//! Sends requests that do not belong to one lock to all servers with locks: a single one, or the
//! masters of a cluster. The client of the library knows which servers those are; each has a
//! connection of its own.

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashMap},
    rc::Rc,
    time::Duration,
};

use fred::{
    error::{Error, ErrorKind},
    util::redis_keyslot,
};
use futures_util::future::join_all;
use nestlock::{LockClient, NodeRole, Topology, TopologyKind, TopologyNode};

use crate::{
    args::Server,
    connect::CONNECT_TIMEOUT,
    failure::Failure,
    node::{Answer, Limits, Node, Words, is_denied, is_down, is_not_now, pairs, words},
};

/// Limits for a single server.
const ALONE: Limits = Limits {
    connect: CONNECT_TIMEOUT,
    answer: Duration::from_secs(10),
    again: Duration::from_secs(1),
};
/// Limits for one of several servers: the replies of the others must not be delayed for long, and
/// another server may take over.
const IN_COMPANY: Limits = Limits {
    connect: Duration::from_secs(3),
    answer: Duration::from_secs(3),
    again: Duration::from_secs(5),
};
/// How often a request is redirected.
const HOPS: usize = 5;
const SLOTS: u16 = 16_384;
/// The name in [`Away`] for a problem of the service as a whole.
pub(crate) const SERVICE: &str = "the servers";
/// How many names are tried to find those at one server: 100 for each of 100 servers.
const NAMES: usize = 10_000;
/// Channels per request.
const CHANNELS: usize = 1_000;

/// Connections to the servers of the URL.
pub(crate) struct Raw<'s> {
    server: &'s Server,
    url: String,
    /// `None`: nothing checked whether locks can be acquired there.
    client: Option<LockClient>,
    nodes: RefCell<BTreeMap<String, Rc<Node>>>,
    away: RefCell<Away>,
}

/// The servers that did not reply, or could not serve a request, and the reason for each.
pub(crate) type Away = BTreeMap<String, String>;

/// The servers as known now.
struct View {
    masters: Vec<Rc<Node>>,
    replicas: Vec<Rc<Node>>,
    /// The first slot, the last slot, and the index of their master. Empty if the servers are no
    /// cluster: the first master has all keys then.
    slots: Vec<(u16, u16, usize)>,
}

impl View {
    fn master(&self, key: &str) -> Option<&Rc<Node>> {
        if self.slots.is_empty() {
            return self.masters.first();
        }
        let slot = redis_keyslot(key.as_bytes());
        let at = self
            .slots
            .iter()
            .find(|(from, to, _)| (*from..=*to).contains(&slot));
        at.and_then(|(.., at)| self.masters.get(*at))
    }
}

/// The requests that are left to send, by address: the server, and for each request its index, and
/// whether its slot is still moving to that server.
type Left = BTreeMap<String, (Rc<Node>, Vec<(usize, bool)>)>;

fn add(left: &mut Left, node: Rc<Node>, at: usize, moves: bool) {
    left.entry(node.address.clone())
        .or_insert_with(|| (node, Vec::new()))
        .1
        .push((at, moves));
}

/// Returns where a refused request has to be sent, and whether only this once.
fn elsewhere(error: &Error, node: &Node) -> Option<(String, bool)> {
    let mut said = error.details().split(' ');
    let asking = match said.next()? {
        "ASK" => true,
        "MOVED" => false,
        _ => return None,
    };
    let address = said.nth(1)?;
    let address = match address.rsplit_once(':')? {
        // without a host, it is the host of this node
        ("", port) => format!("{}:{port}", node.host()),
        // the node does not know the address
        ("?", _) => return None,
        _ => address.to_owned(),
    };
    Some((address, asking))
}

impl<'s> Raw<'s> {
    pub(crate) async fn connect(server: &'s Server) -> Result<Self, Failure> {
        Ok(Self {
            client: Some(server.connect_to_look().await?),
            ..Self::without(server)?
        })
    }

    /// Connects, and checks that locks can be acquired there.
    pub(crate) async fn connect_to_lock(server: &'s Server) -> Result<Self, Failure> {
        Ok(Self {
            client: Some(server.connect(None).await?),
            ..Self::without(server)?
        })
    }

    /// Uses the single server of the URL, whatever it is, without a client for locks.
    pub(crate) fn without(server: &'s Server) -> Result<Self, Failure> {
        Ok(Self {
            server,
            url: server.url()?,
            client: None,
            nodes: RefCell::default(),
            away: RefCell::default(),
        })
    }

    /// Returns the client that acquires locks there.
    pub(crate) fn locks(&self) -> Result<&LockClient, Failure> {
        self.client
            .as_ref()
            .ok_or_else(|| "no lock client is connected".into())
    }

    pub(crate) fn topology(&self) -> Option<Topology> {
        self.client.as_ref().map(LockClient::topology)
    }

    pub(crate) fn is_cluster(&self) -> bool {
        self.topology()
            .is_some_and(|topology| topology.kind == TopologyKind::Cluster)
    }

    fn node(
        &self,
        address: &str,
        of: Option<&TopologyNode>,
        limits: Limits,
    ) -> Result<Rc<Node>, Error> {
        if let Some(known) = self.nodes.borrow().get(address) {
            return Ok(Rc::clone(known));
        }
        let of = of.map(|node| {
            let mut node = node.clone();
            address.clone_into(&mut node.address);
            node
        });
        let unusable = |error: Failure| Error::new(ErrorKind::Config, error.to_string());
        let builder = self.server.build().map_err(unusable)?;
        let config = builder
            .fred_config(&self.url, of.as_ref())
            .map_err(|error| unusable(error.into()))?;
        let is_sentinel = of.is_some_and(|node| node.role == NodeRole::Sentinel);
        let node = Node::new(address.to_owned(), config, limits);
        let node = Rc::new(if is_sentinel { node.or_bare() } else { node });
        self.nodes
            .borrow_mut()
            .insert(address.to_owned(), Rc::clone(&node));
        Ok(node)
    }

    /// Returns the servers as known now, and drops the connections to all others.
    fn view(&self) -> Result<View, Error> {
        let Some(topology) = self.topology() else {
            let address = self.server.address().unwrap_or_default();
            let master = self.node(&address, None, ALONE)?;
            return Ok(View {
                masters: vec![master],
                replicas: Vec::new(),
                slots: Vec::new(),
            });
        };
        self.nodes
            .borrow_mut()
            .retain(|address, _| topology.nodes.iter().any(|node| node.address == *address));
        let limits = if topology.kind == TopologyKind::Server {
            ALONE
        } else {
            IN_COMPANY
        };
        let of = |role: NodeRole| topology.nodes.iter().filter(move |node| node.role == role);
        let nodes = |role| -> Result<Vec<_>, _> {
            of(role)
                .map(|node| self.node(&node.address, Some(node), limits))
                .collect()
        };
        let (masters, replicas) = (nodes(NodeRole::Master), nodes(NodeRole::Replica));
        let slots = of(NodeRole::Master).enumerate().flat_map(|(at, node)| {
            let ranges = node.slots.iter();
            ranges.map(move |range| (*range.start(), *range.end(), at))
        });
        Ok(View {
            masters: masters?,
            replicas: replicas?,
            slots: slots.collect(),
        })
    }

    /// Returns the servers with locks.
    pub(crate) fn masters(&self) -> Vec<Rc<Node>> {
        let mut away = self.away.borrow_mut();
        match self.view() {
            Ok(View { masters, slots, .. }) => {
                let unserved = unserved(slots);
                if masters.is_empty() {
                    away.insert(SERVICE.to_owned(), "no master is known".to_owned());
                } else if !unserved.is_empty() {
                    away.insert(
                        SERVICE.to_owned(),
                        format!("no master serves slots {}", unserved.join(", ")),
                    );
                }
                masters
            }
            Err(error) => {
                away.insert(SERVICE.to_owned(), error.details().to_owned());
                Vec::new()
            }
        }
    }

    /// Returns whether no master replies.
    pub(crate) fn is_dark(&self, away: &Away) -> bool {
        self.view().map_or(true, |view| {
            view.masters
                .iter()
                .all(|node| away.contains_key(&node.address))
        })
    }

    /// Returns the masters, and the replicas of a cluster.
    pub(crate) fn everyone(&self) -> Result<Vec<Rc<Node>>, Error> {
        let View {
            masters, replicas, ..
        } = self.view()?;
        Ok(masters.into_iter().chain(replicas).collect())
    }

    pub(crate) fn sentinels(&self) -> Result<Vec<Rc<Node>>, Error> {
        let nodes = self
            .topology()
            .map(|topology| topology.nodes)
            .unwrap_or_default();
        let sentinels = nodes.iter().filter(|node| node.role == NodeRole::Sentinel);
        sentinels
            .map(|node| self.node(&node.address, Some(node), IN_COMPANY))
            .collect()
    }

    /// Returns the server with this key.
    pub(crate) fn master_of(&self, key: &str) -> Result<Rc<Node>, Error> {
        self.view()?
            .master(key)
            .map(Rc::clone)
            .ok_or_else(|| no_node(key))
    }

    /// Returns names that begin with `before`, and whose locks are at this server.
    pub(crate) fn names_at<'n>(
        &'n self,
        node: &'n Node,
        before: &'n str,
    ) -> impl Iterator<Item = String> + 'n {
        let view = self.view();
        let is_there = move |name: &String| {
            let key = format!("{}{name}", self.server.prefix);
            view.as_ref().is_ok_and(|view| {
                view.master(&key)
                    .is_some_and(|of| of.address == node.address)
            })
        };
        // the number is limited: a tag in the prefix may put all names into one slot
        (0..NAMES)
            .map(move |n| format!("{before}:{n}"))
            .filter(is_there)
    }

    /// Sends the same request to each node, concurrently.
    pub(crate) async fn ask_each(&self, nodes: &[Rc<Node>], words: &[&str]) -> Vec<Answer> {
        let asked = nodes.iter().map(async |node| {
            let answer = node.ask(words).await;
            self.note(&node.address, answer.as_ref().err());
            answer
        });
        join_all(asked).await
    }

    /// Sends a request to the server with the key that is its second word.
    pub(crate) async fn ask(&self, words: &[&str]) -> Answer {
        let answer = self.ask_all(vec![self::words(words)]).await.pop();
        answer.unwrap_or_else(|| Err(Error::new(ErrorKind::Unknown, "no reply")))
    }

    /// Sends many requests in few round trips. A refused request does not affect the others.
    pub(crate) async fn ask_all(&self, requests: Vec<Words>) -> Vec<Answer> {
        let key = |at: usize| requests[at].get(1).map_or("", String::as_str);
        let mut answers: Vec<Answer> = (0..requests.len())
            .map(|at| Err(no_node(key(at))))
            .collect();
        let mut left = Left::new();
        match self.view() {
            Err(error) => return requests.iter().map(|_| Err(error.clone())).collect(),
            Ok(view) => {
                for at in 0..requests.len() {
                    match view.master(key(at)) {
                        None => self.note(SERVICE, Some(&no_node(key(at)))),
                        Some(node) => add(&mut left, Rc::clone(node), at, false),
                    }
                }
            }
        }
        let asking = words(&["ASKING"]);
        for hop in 0..=HOPS {
            let asked = std::mem::take(&mut left)
                .into_values()
                .map(async |(node, some)| {
                    let with = |(at, moves): &(usize, bool)| {
                        moves.then_some(&asking).into_iter().chain([&requests[*at]])
                    };
                    let mut said = node.ask_all(some.iter().flat_map(with)).await.into_iter();
                    // the reply to ASKING comes before the reply to the request
                    let answered = some
                        .iter()
                        .filter_map(|(at, moves)| Some((*at, said.nth(usize::from(*moves))?)));
                    (Rc::clone(&node), answered.collect::<Vec<_>>())
                });
            for (node, answered) in join_all(asked).await {
                for (at, answer) in answered {
                    let goes = answer
                        .as_ref()
                        .err()
                        .filter(|_| hop < HOPS)
                        .and_then(|error| elsewhere(error, &node));
                    if let Some((next, moves)) =
                        goes.and_then(|(address, moves)| Some((self.redirected(&address)?, moves)))
                    {
                        add(&mut left, next, at, moves);
                    } else {
                        self.note(&node.address, answer.as_ref().err());
                        answers[at] = answer;
                    }
                }
            }
        }
        answers
    }

    /// Returns the server that a redirect names.
    fn redirected(&self, address: &str) -> Option<Rc<Node>> {
        let topology = self.topology()?;
        let like = topology
            .nodes
            .iter()
            .find(|node| node.role == NodeRole::Master)?;
        self.node(address, Some(like), IN_COMPANY).ok()
    }

    fn note(&self, address: &str, error: Option<&Error>) {
        if let Some(error) = error.filter(|error| is_not_now(error)) {
            self.away
                .borrow_mut()
                .insert(address.to_owned(), error.details().to_owned());
        }
    }

    /// Returns the servers that were away since the last call.
    pub(crate) fn away(&self) -> Away {
        self.away.take()
    }

    /// Counts the subscribers of these channels over all servers, since a subscriber may be
    /// connected to any of them. The counts of plain and sharded messages are added, since no
    /// client subscribes to both. If the count of one server is unknown, so is the total.
    pub(crate) async fn listeners(
        &self,
        channels: &[String],
    ) -> Result<HashMap<String, u64>, Unheard> {
        let away =
            |address: &str, error: &Error| Unheard::Away(format!("{address}: {}", error.details()));
        let nodes = self.everyone().map_err(|error| away(SERVICE, &error))?;
        let questions: &[&str] = if self.is_cluster() {
            &["NUMSUB", "SHARDNUMSUB"]
        } else {
            &["NUMSUB"]
        };
        let requests: Vec<Words> = questions
            .iter()
            .flat_map(|what| {
                channels
                    .chunks(CHANNELS)
                    .map(move |some| [&words(&["PUBSUB", what]), some].concat())
            })
            .collect();
        let mut counts: HashMap<String, u64> = HashMap::new();
        let asked = nodes
            .iter()
            .map(async |node| (node, node.ask_all(&requests).await));
        for (node, answers) in join_all(asked).await {
            for (words, answer) in requests.iter().zip(answers) {
                match answer {
                    Ok(said) => {
                        for (channel, count) in pairs(said).unwrap_or_default() {
                            *counts.entry(channel).or_default() += count.parse().unwrap_or(0);
                        }
                    }
                    // no client is connected there, either
                    Err(error) if is_down(&error) => {}
                    Err(error) if is_denied(&error) => {
                        let is_sharded = words[1] == "SHARDNUMSUB";
                        return Err(Unheard::Denied(if is_sharded {
                            "pubsub|shardnumsub"
                        } else {
                            "pubsub|numsub"
                        }));
                    }
                    // before Redis 7.0 there are no sharded channels
                    Err(error) if words[1] == "SHARDNUMSUB" && !is_not_now(&error) => {}
                    Err(error) => return Err(away(&node.address, &error)),
                }
            }
        }
        Ok(counts)
    }
}

/// Why the subscribers are unknown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Unheard {
    /// The server that does not report them, and why.
    Away(String),
    /// This permission is missing.
    Denied(&'static str),
}

/// Returns the slot ranges that have no master. Returns none if no slots are given.
pub(crate) fn unserved(mut slots: Vec<(u16, u16, usize)>) -> Vec<String> {
    slots.sort_unstable();
    let (mut next, mut gaps) = (0, Vec::new());
    // no slots: the servers are no cluster
    let end = if slots.is_empty() {
        None
    } else {
        Some((SLOTS, SLOTS, 0))
    };
    for (from, to, _) in slots.into_iter().chain(end) {
        if from > next {
            gaps.push(format!("{next}-{}", from - 1));
        }
        next = to + 1;
    }
    gaps
}

fn no_node(key: &str) -> Error {
    Error::new(
        ErrorKind::IO,
        format!("no master serves slot {}", redis_keyslot(key.as_bytes())),
    )
}
