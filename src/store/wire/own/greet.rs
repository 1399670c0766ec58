//! How a connection is made, and makes itself known.

use std::{io, sync::Arc, time::Duration};

use futures_util::future::join_all;
use tokio::time::timeout;

use super::{Connection, Reply};
use crate::{
    clock::Instant,
    store::wire::{Dial, Failure, NotConnected, Request, Until, stream},
};

/// What each step of the handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(2);

/// Connects, and makes itself known. On the client's own runtime.
pub(in super::super) async fn connect(dial: &Dial) -> Result<Arc<Connection>, NotConnected> {
    let address = stream::Address::of(&dial.server)?;
    let credentials = (dial.server.username.clone(), dial.server.password.clone());
    #[cfg(feature = "fred-config")]
    let credentials = match &dial.server.credential_provider {
        Some(provider) => {
            let fetched = provider.fetch(dial.server.server.hosts().first()).await;
            fetched.map_err(|error| NotConnected::from_fred(&error))?
        }
        None => credentials,
    };
    let hello = hello(credentials.0, credentials.1);
    let late = |_| Err(io::ErrorKind::TimedOut.into());
    let (reader, writer) = timeout(dial.connect_timeout, address.open()).await.unwrap_or_else(late)?;
    let connection = Connection::start(reader, writer, dial.sink.clone(), dial.command_timeout, dial.own.clone());
    // whoever gives up midway leaves nothing behind
    let ends = Ends(Some(Arc::clone(&connection)));
    let limit = dial.connect_timeout.min(HANDSHAKE);
    let ask = |words: &[&str]| {
        let asked =
            connection.ask(Until::new(Instant::now(), limit), Reply::Value, |out| Request::Words(words).encode(out));
        asked.map_err(|failure| connection.because(failure))
    };
    let words: Vec<&str> = hello.iter().map(|word| &**word).collect();
    let mut asked = vec![ask(&words)?];
    if let Some(database @ 1..) = dial.server.database {
        asked.push(ask(&["SELECT", &database.to_string()])?);
    }
    let needed = asked.len();
    // for whoever reads CLIENT LIST; older servers know no such command
    for (what, name) in [("LIB-NAME", "nestlock"), ("LIB-VER", env!("CARGO_PKG_VERSION"))] {
        asked.push(ask(&["CLIENT", "SETINFO", what, name])?);
    }
    // a HELLO of its own, which asks for no permission, unlike CLIENT SETNAME: whoever refuses names still lets us in
    asked.push(ask(&["HELLO", "3", "SETNAME", &dial.name])?);
    // together: one round trip
    for (n, answer) in join_all(asked).await.into_iter().enumerate() {
        match answer {
            Err(Failure::Refused(_)) if n >= needed => {}
            answer => _ = answer.map_err(|failure| connection.because(failure))?,
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
fn hello(user: Option<String>, password: Option<String>) -> Vec<String> {
    let mut words = vec!["HELLO".to_owned(), "3".to_owned()];
    if let Some(password) = password {
        words.extend(["AUTH".to_owned(), user.unwrap_or_else(|| "default".to_owned()), password]);
    }
    words
}
