//! How a connection is made, and makes itself known.

use std::{io, sync::Arc, time::Duration};

use tokio::time::timeout;

use super::Connection;
use crate::{
    clock::Instant,
    store::wire::{Dial, Failure, NotConnected, Request, Until, stream},
};

/// What each step of the handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(2);

/// Connects, and makes itself known. On the client's own runtime.
pub(in super::super) async fn connect(dial: &Dial) -> Result<Arc<Connection>, NotConnected> {
    let (address, hello) = (stream::Address::of(&dial.server)?, hello(dial).await?);
    let late = |_| Err(io::ErrorKind::TimedOut.into());
    let (reader, writer) = timeout(dial.connect_timeout, address.open()).await.unwrap_or_else(late)?;
    let connection = Connection::start(reader, writer, dial.sink.clone(), dial.command_timeout, dial.own.clone());
    // whoever gives up midway leaves nothing behind
    let ends = Ends(Some(Arc::clone(&connection)));
    let limit = dial.connect_timeout.min(HANDSHAKE);
    let ask =
        |words: &[&str]| connection.ask(Until::new(Instant::now(), limit), 0, |out| Request::Words(words).encode(out));
    let words: Vec<&str> = hello.iter().map(|word| &**word).collect();
    let greeted = ask(&words)?;
    let selected = match dial.server.database {
        None | Some(0) => None,
        Some(database) => Some(ask(&["SELECT", &database.to_string()])?),
    };
    // for whoever reads CLIENT LIST; older servers know no such command
    let named = [("LIB-NAME", "nestlock"), ("LIB-VER", env!("CARGO_PKG_VERSION"))];
    let named = named.map(|(what, name)| ask(&["CLIENT", "SETINFO", what, name]));
    greeted.await?;
    if let Some(selected) = selected {
        selected.await?;
    }
    for asked in named {
        match asked?.await {
            Ok(_) | Err(Failure::Refused(_)) => {}
            Err(failure) => return Err(failure.into()),
        }
    }
    if let Some(driver) = &dial.driver {
        connection.drive_on(driver);
    }
    ends.keep();
    Ok(connection)
}

/// Ends a connection that nobody took.
struct Ends(Option<Arc<Connection>>);

impl Ends {
    fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        if let Some(connection) = &self.0 {
            connection.end("nobody waits for it any more");
        }
    }
}

/// The first request.
async fn hello(dial: &Dial) -> Result<Vec<String>, NotConnected> {
    let server = &dial.server;
    let (mut user, mut password) = (server.username.clone(), server.password.clone());
    #[cfg(feature = "fred-config")]
    if let Some(provider) = &server.credential_provider {
        (user, password) =
            provider.fetch(server.server.hosts().first()).await.map_err(|error| NotConnected::from_fred(&error))?;
    }
    let mut words = vec!["HELLO".to_owned(), "3".to_owned()];
    if let Some(password) = password.take() {
        words.extend(["AUTH".to_owned(), user.take().unwrap_or_else(|| "default".to_owned()), password]);
    }
    Ok(words)
}
