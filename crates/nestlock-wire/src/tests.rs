//! Helpers for the unit tests of several files.

use std::{
    io,
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::net::UnixStream,
};

use tokio::runtime::Handle;

use crate::{
    address::{Address, Server},
    bundle::Bundle,
    dialer::Dialer,
    script::{Arg, Call, Script},
    settings::{ConnectionSettings, ServerSettings},
    source::{Arity, ScriptSource},
};

static NOTHING: Script = script("nothing", "return 0", 1);
static ONE: Script = part("one", "return redis.call('set', KEYS[1], ARGV[1])");
static OTHER: Script = part("other", "return redis.call('del', KEYS[1])");
static BOTH: Bundle = Bundle::of(&[&ONE.source, &OTHER.source]);

const fn script(name: &'static str, lua: &'static str, args: usize) -> Script {
    Script::new(source(name, lua, args), as_it_is, None)
}

const fn part(name: &'static str, lua: &'static str) -> Script {
    Script::new(source(name, lua, 3), as_it_is, Some(&BOTH))
}

const fn source(name: &'static str, lua: &'static str, args: usize) -> ScriptSource {
    ScriptSource {
        name,
        lua,
        keys: Arity {
            fixed: 1,
            per_lock: 0,
        },
        args: Arity {
            fixed: args,
            per_lock: 0,
        },
        is_atomic: true,
        names_keys: false,
    }
}

fn as_it_is(name: &str) -> [&str; 5] {
    [name, "", "", "", ""]
}

/// Returns a request that changes nothing.
pub(crate) fn call(key: &str) -> Call {
    Call::new(&NOTHING, [key.into()], [Arg::Text("nobody".into())])
}

/// Returns a request that may be bundled with others.
pub(crate) fn one_of_two(key: &str, is_other: bool) -> Call {
    let args = ["owner", "2", ""].map(|arg| Arg::Text(arg.into()));
    Call::new(if is_other { &OTHER } else { &ONE }, [key.into()], args)
}

/// Returns a dialer for a port of a host, with the default limits.
pub(crate) fn dialer(host: &str, port: u16, own: Handle) -> Dialer {
    let address = Address::Tcp(Server::new(host, port));
    Dialer::new(ConnectionSettings::new(ServerSettings::new(address), own))
}

/// Returns a dialer for an address.
pub(crate) fn dialer_to(address: SocketAddr, own: Handle) -> Dialer {
    dialer(&address.ip().to_string(), address.port(), own)
}

/// Returns the system's errors for a missing socket and for a closed port.
pub(crate) fn absent_servers() -> [io::Error; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap();
    drop(listener);
    [
        UnixStream::connect("/nobody/is/here").unwrap_err(),
        TcpStream::connect(port).unwrap_err(),
    ]
}
