//! One connection, by either client.

use std::{fmt, sync::Arc};

use async_trait::async_trait;

use crate::{
    clock::Instant,
    expiring::Expiring,
    failure::Failure,
    own::{self, out::Reply},
    request::{Channels, Request},
    resp::{self, Value},
    texts::Texts,
    until::Until,
};

/// A connection to a server, from its handshake to its end. A clone is the same connection.
///
/// ```
/// # use nestlock_wire::{Address, ConnectionSettings, Server, ServerSettings};
/// # use tokio::runtime::Handle;
/// use std::time::Duration;
///
/// use nestlock_wire::{Dialer, Request, Until, Value, clock::Instant};
///
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = nestlock_embedded::EmbeddedServer::start()?;
/// # let address = Address::Tcp(Server::new("127.0.0.1", server.addr().port()));
/// # let settings = ConnectionSettings::new(ServerSettings::new(address), Handle::current());
/// let limit = Duration::from_secs(3);
/// let connection = Dialer::new(settings).connect(limit).await.map_err(|failed| failed.error)?;
/// let until = Until::new(Instant::now(), limit);
/// let reply = connection.call(Request::Words(&["INCR", "orders"]), until).await;
/// assert_eq!(reply, Ok(Value::Integer(1)));
/// connection.end();
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Connection {
    client: Client,
    credentials: Option<Arc<Expiring>>,
}

/// The client that made the connection.
#[derive(Clone)]
enum Client {
    Own(Arc<own::OwnConnection>),
    #[cfg_attr(
        not(feature = "fred"),
        expect(dead_code, reason = "the only foreign client is fred's")
    )]
    Foreign(Arc<dyn ForeignConnection>),
}

/// A connection of a client other than nestlock's own. Each method does what the method of
/// [`Connection`] with the same name documents.
#[async_trait]
pub(crate) trait ForeignConnection: Send + Sync {
    async fn call(self: Arc<Self>, request: Request<'_>, until: Until) -> Result<Value, Failure>;

    async fn channels(
        &self,
        verb: Channels,
        channels: &[String],
        until: Until,
    ) -> Result<(), Failure>;

    async fn listen(&self, channel: &str) -> Result<(), Failure>;

    async fn echo(&self, until: Until) -> Result<(), Failure>;

    fn had_reply(&self) -> bool;

    fn end(&self);

    fn has_ended(&self) -> bool;

    async fn ended(&self);
}

/// Ends a connection when dropped, unless it is kept: a future that sends a query or two may be
/// dropped midway.
///
/// ```
/// # use nestlock_wire::{CloseOnDrop, Connection, Failure, Request, Until};
/// async fn checked(connection: Connection, until: Until) -> Result<Connection, Failure> {
///     let closed = CloseOnDrop::new(connection);
///     closed.connection.call(Request::Words(&["PING"]), until).await?; // a failure ends it
///     Ok(closed.keep())
/// }
/// ```
#[derive(Debug)]
pub struct CloseOnDrop {
    /// The connection that is ended.
    pub connection: Connection,
    is_kept: bool,
}

impl CloseOnDrop {
    /// Creates the guard of a connection.
    #[must_use]
    pub fn new(connection: Connection) -> Self {
        Self {
            connection,
            is_kept: false,
        }
    }

    /// Returns the connection without ending it.
    #[must_use]
    pub fn keep(mut self) -> Connection {
        self.is_kept = true;
        self.connection.clone()
    }
}

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        if !self.is_kept {
            self.connection.end();
        }
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("has_ended", &self.has_ended())
            .finish_non_exhaustive()
    }
}

impl From<Arc<own::OwnConnection>> for Connection {
    fn from(own: Arc<own::OwnConnection>) -> Self {
        Self {
            client: Client::Own(own),
            credentials: None,
        }
    }
}

impl Connection {
    /// Returns a connection that another client made.
    #[cfg(feature = "fred")]
    pub(crate) fn foreign(connection: Arc<dyn ForeignConnection>) -> Self {
        Self {
            client: Client::Foreign(connection),
            credentials: None,
        }
    }

    /// Returns the same connection, which was opened with these credentials.
    pub(crate) fn logged_in_with(mut self, credentials: Option<Expiring>) -> Self {
        self.credentials = credentials.map(Arc::new);
        self
    }

    /// Returns the credentials with which it was opened, if they expire.
    pub(crate) fn credentials(&self) -> Option<&Expiring> {
        self.credentials.as_deref()
    }

    /// Sends a request, at most once. The first poll queues it, so it comes before everything sent
    /// later.
    ///
    /// # Errors
    ///
    /// [`Failure`]. Converted to a [`StoreError`](crate::StoreError), a known error of the server
    /// counts as not executed, even if a script met it after it had written: for scripts, use
    /// [`Link::eval`](crate::Link::eval).
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped after its first poll, the request may still be executed.
    pub async fn call(&self, request: Request<'_>, until: Until) -> Result<Value, Failure> {
        // the first poll may come long after the limits were set
        if until.remaining(Instant::now()).is_zero() {
            return Err(Failure::LateUnsent);
        }
        match &self.client {
            Client::Own(own) => {
                let encode = |out: &mut Vec<u8>, number, texts: &mut Texts| {
                    request.encode(number, out, texts)
                };
                let asked = match request {
                    Request::Asking(..) => own.send(until, Reply::Second, encode),
                    Request::Words(_) => own.send(until, Reply::Unnamed, encode),
                    _ => own.send(until, Reply::Script, encode),
                };
                asked?.await
            }
            Client::Foreign(foreign) => Arc::clone(foreign).call(request, until).await,
        }
    }

    /// Subscribes or unsubscribes. Completes once the server has done so for each channel.
    pub(crate) async fn channels(
        &self,
        verb: Channels,
        channels: &[String],
        until: Until,
    ) -> Result<(), Failure> {
        match &self.client {
            Client::Own(own) => {
                let words: Vec<&str> = [verb.word()]
                    .into_iter()
                    .chain(channels.iter().map(String::as_str))
                    .collect();
                // if a slot has moved, a server replies twice, or only with an error: the PING
                // behind it marks the end
                let sharded = matches!(
                    verb,
                    Channels::SubscribeSharded | Channels::UnsubscribeSharded
                );
                let asked = if sharded {
                    own.send(until, Reply::Echo(None), |out, number, texts| {
                        Request::Words(&words).encode(number, out, texts);
                        resp::write_ping(out, number);
                        None
                    })
                } else {
                    let encode = |out: &mut Vec<u8>, number, texts: &mut Texts| {
                        Request::Words(&words).encode(number, out, texts)
                    };
                    own.send(until, Reply::Pushes(channels.len()), encode)
                };
                asked?.await.map(drop)
            }
            Client::Foreign(foreign) => foreign.channels(verb, channels, until).await,
        }
    }

    /// Subscribes to a channel, if the user has permission. With another client, nothing proves
    /// that it happened.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped after its first poll, the subscription may still be made.
    pub async fn listen(&self, channel: &str, until: Until) -> Result<(), Failure> {
        match &self.client {
            Client::Own(_) => {
                let channels = [channel.to_owned()];
                self.channels(Channels::Subscribe, &channels, until).await
            }
            Client::Foreign(foreign) => foreign.listen(channel).await,
        }
    }

    /// Sends PING with a number. A reply with another number ends the connection.
    pub(crate) async fn echo(&self, until: Until) -> Result<(), Failure> {
        match &self.client {
            Client::Own(own) => own.ping(until)?.await.map(drop),
            Client::Foreign(foreign) => foreign.echo(until).await,
        }
    }

    /// Returns whether both are the same connection.
    pub(crate) fn is(&self, other: &Self) -> bool {
        match (&self.client, &other.client) {
            (Client::Own(own), Client::Own(other)) => Arc::ptr_eq(own, other),
            (Client::Foreign(foreign), Client::Foreign(other)) => {
                std::ptr::addr_eq(Arc::as_ptr(foreign), Arc::as_ptr(other))
            }
            _ => false,
        }
    }

    /// Returns whether a reply has arrived since the last call.
    pub(crate) fn had_reply(&self) -> bool {
        match &self.client {
            Client::Own(own) => own.had_reply(),
            Client::Foreign(foreign) => foreign.had_reply(),
        }
    }

    /// Returns when the oldest request in flight was sent. Returns `None` if none is in flight, and
    /// always with another client, which does not report it.
    pub(crate) fn waits_since(&self) -> Option<Instant> {
        match &self.client {
            Client::Own(own) => own.waits_since(),
            Client::Foreign(_) => None,
        }
    }

    /// Returns the number of requests in flight. Always 0 with another client, which does not
    /// report it.
    pub(crate) fn in_flight(&self) -> usize {
        match &self.client {
            Client::Own(own) => own.in_flight(),
            Client::Foreign(_) => 0,
        }
    }

    /// Makes sure that replies are read soon, whatever the user's runtime does.
    pub(crate) fn prioritize(&self) {
        if let Client::Own(own) = &self.client {
            own.prioritize();
        }
    }

    /// Ends the connection. Requests in flight fail.
    pub fn end(&self) {
        match &self.client {
            Client::Own(own) => own.end("closed by this client"),
            Client::Foreign(foreign) => foreign.end(),
        }
    }

    /// Returns whether the connection has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        match &self.client {
            Client::Own(own) => own.has_ended(),
            Client::Foreign(foreign) => foreign.has_ended(),
        }
    }

    /// Waits for the end of the connection. No reply arrives after it.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn ended(&self) {
        match &self.client {
            Client::Own(own) => own.ended().await,
            Client::Foreign(foreign) => foreign.ended().await,
        }
    }
}
