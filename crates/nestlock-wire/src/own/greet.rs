//! Opens a connection and performs the handshake: login, database, connection name.

use std::{
    sync::{
        Arc, Mutex, OnceLock, Weak,
        atomic::{AtomicBool, AtomicU64},
    },
    task::Waker,
    time::Duration,
};

use futures_util::{
    future::{OptionFuture, join4},
    task::AtomicWaker,
};
use tokio::{
    runtime::Handle,
    sync::{Notify, watch},
};

use crate::{
    clock::Instant,
    credentials::Login,
    failure::{Failure, NotConnected},
    numbered,
    own::{
        OwnConnection, Writable,
        driver::Driver,
        incoming::Incoming,
        keeper::Keeper,
        out::{Out, Reply},
    },
    process::Home,
    push::Sink,
    request::Request,
    resp::Value,
    settings::ConnectionSettings,
    stream::{self, ReadHalf, WriteHalf},
    until::Until,
};

/// Longest time for the handshake's requests, which are pipelined.
const HANDSHAKE: Duration = Duration::from_secs(2);

/// Why the handshake fails if its replies do not match its requests.
const SHIFTED: &str = "the replies to the handshake do not match its requests";

/// Connects and performs the handshake. Runs on the client's own runtime. The caller limits the
/// total time.
pub(crate) async fn connect(
    settings: &ConnectionSettings,
) -> Result<Arc<OwnConnection>, NotConnected> {
    let has_password = settings.server.login.password.is_some();
    let hello = hello(settings.server.login.clone());
    let (reader, writer) = stream::open(&settings.server).await?;
    let connection = OwnConnection::start(
        reader,
        writer,
        settings.sink.clone(),
        settings.command_timeout,
        settings.own.clone(),
    );
    // A handshake that fails or is dropped midway must not leave a connection behind.
    let ends = CloseUntaken(Some(Arc::clone(&connection)));
    greet(&connection, settings, &hello)
        .await
        .map_err(|failure| NotConnected::of_handshake(connection.because(failure), has_password))?;
    if let Some(driver) = &settings.driver {
        connection.drive_on(driver);
    }
    ends.keep();
    Ok(connection)
}

/// Performs the handshake, which begins with the words `hello`, in one round trip.
async fn greet(
    connection: &Arc<OwnConnection>,
    settings: &ConnectionSettings,
    hello: &[String],
) -> Result<(), Failure> {
    let limit = settings.connect_timeout.min(HANDSHAKE);
    let until = Until::new(Instant::now(), limit);
    let ask = |words: &[&str]| {
        connection.send(until, Reply::Greeting, |out, number, texts| {
            Request::Words(words).encode(number, out, texts)
        })
    };
    let words: Vec<&str> = hello.iter().map(|word| &**word).collect();
    let login = ask(&words)?;
    let database = match settings.server.database {
        Some(database @ 1..) => Some(ask(&["SELECT", &database.to_string()])?),
        _ => None,
    };
    // Set the name with a separate HELLO: if the server refuses it, the login still succeeds.
    // Unlike CLIENT SETNAME, HELLO needs no permission.
    let name = ask(&["HELLO", "3", "SETNAME", &settings.name])?;
    // Shown by CLIENT LIST. Older servers do not know the command, so the replies are ignored.
    for (what, name) in [
        ("LIB-NAME", "nestlock"),
        ("LIB-VER", env!("CARGO_PKG_VERSION")),
    ] {
        drop(ask(&["CLIENT", "SETINFO", what, name])?);
    }
    // One PING for all of them, since the server would refuse it before the login. It proves that
    // each reply belongs to its request.
    let proof = connection.ping(until)?;
    // Await all replies together: the handshake takes one round trip.
    let (login, database, name, proof) =
        join4(login, OptionFuture::from(database), name, proof).await;
    let login = login?;
    let selected = database
        .transpose()?
        .is_none_or(|selected| selected.as_str() == Some("OK"));
    let is_same = match name {
        Ok(named) => id(&named) == id(&login),
        Err(Failure::Refused(_)) => true,
        Err(failure) => return Err(failure),
    };
    match proof {
        Ok(_) | Err(Failure::Refused(_))
            if matches!(login, Value::Array(_)) && selected && is_same =>
        {
            Ok(())
        }
        Ok(_) | Err(Failure::Refused(_)) => Err(Failure::Nonsense(SHIFTED.into())),
        Err(failure) => Err(failure),
    }
}

/// Ends the connection on drop, unless it was kept.
struct CloseUntaken(Option<Arc<OwnConnection>>);

impl CloseUntaken {
    fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for CloseUntaken {
    fn drop(&mut self) {
        if let Some(connection) = &self.0 {
            connection.end("the handshake failed or was cancelled");
        }
    }
}

/// Returns the connection's id on the server, from a reply to HELLO.
fn id(hello: &Value) -> Option<&Value> {
    let Value::Array(parts) = hello else {
        return None;
    };
    parts
        .chunks_exact(2)
        .find(|field| field[0].as_str() == Some("id"))
        .map(|field| &field[1])
}

/// Returns the words of the first request, HELLO with the login.
fn hello(Login { user, password }: Login) -> Vec<String> {
    let mut words = vec!["HELLO".to_owned(), "3".to_owned()];
    if let Some(password) = password {
        words.extend([
            "AUTH".to_owned(),
            user.unwrap_or_else(|| "default".to_owned()),
            password,
        ]);
    }
    words
}

impl OwnConnection {
    /// Starts the driver and the keeper for a stream that was opened on the client's own thread.
    /// Must be called in the context of that thread's runtime.
    pub(crate) fn start(
        reader: ReadHalf,
        writer: WriteHalf,
        sink: Option<Sink>,
        limit: Duration,
        own: Handle,
    ) -> Arc<Self> {
        let connection = Arc::new_cyclic(|connection| {
            let writable = Arc::new(Writable {
                is_so: AtomicBool::new(false),
                connection: Weak::clone(connection),
            });
            Self {
                out: Mutex::new(Out::new(numbered::base())),
                incoming: Mutex::new(Some(Incoming::new(reader))),
                writer: Mutex::new(Some(writer)),
                taken: AtomicU64::new(0),
                waker: AtomicWaker::new(),
                when_writable: Waker::from(Arc::clone(&writable)),
                writable,
                polls: AtomicU64::new(0),
                reads: AtomicU64::new(0),
                resting: AtomicWaker::new(),
                may_return: AtomicBool::new(true),
                has_reply: AtomicBool::new(false),
                is_ended: watch::Sender::new(false),
                why: OnceLock::new(),
                sooner: Notify::new(),
                driven_by: OnceLock::new(),
                reader_check: Notify::new(),
                sink,
                limit,
                own,
                home: Home::here(),
            }
        });
        connection.own.spawn(Driver::new(&connection, 1, true));
        connection.own.spawn(Keeper(Arc::clone(&connection)).keep());
        connection
    }
}
