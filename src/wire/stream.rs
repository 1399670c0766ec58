//! Opens connections to servers. The two halves of a connection can move from one runtime to
//! another.

use std::{io, mem::MaybeUninit, path::PathBuf};

use fred::types::config::{Config as FredConfig, ServerConfig};
use socket2::SockRef;
#[cfg(unix)]
use tokio::net::{UnixStream, unix};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, tcp},
};

use crate::wire::reach;

/// The address of a server.
#[derive(Debug, Clone)]
pub(crate) enum Address {
    Tcp(String, u16),
    #[cfg(unix)]
    Unix(PathBuf),
    #[cfg(feature = "rustls")]
    Tls(String, u16, tls::Connector),
}

impl Address {
    /// Returns the address in a configuration.
    pub(crate) fn of(server: &FredConfig) -> io::Result<Self> {
        let at = match &server.server {
            ServerConfig::Centralized { server } => server,
            #[cfg(unix)]
            ServerConfig::Unix { path } => return Ok(Self::Unix(path.clone())),
            _ => return Err(io::Error::other("not one server")),
        };
        let host = bare(&at.host).to_owned();
        #[cfg(feature = "rustls")]
        if let Some(tls) = &server.tls {
            let fred::types::config::TlsConnector::Rustls(connector) = &tls.connector;
            let name = at
                .tls_server_name
                .as_deref()
                .map_or_else(|| host.clone(), |name| bare(name).to_owned());
            return Ok(Self::Tls(
                host,
                at.port,
                tls::Connector(connector.clone(), name),
            ));
        }
        Ok(Self::Tcp(host, at.port))
    }

    /// Connects. The socket belongs to the runtime that polls this.
    pub(crate) async fn open(&self) -> io::Result<(ReadHalf, WriteHalf)> {
        match self {
            Self::Tcp(host, port) => {
                let (reader, writer) = tcp(host, *port).await?.into_split();
                Ok((ReadHalf::Tcp(reader), WriteHalf::Tcp(writer)))
            }
            #[cfg(unix)]
            Self::Unix(path) => {
                let (reader, writer) = UnixStream::connect(path).await?.into_split();
                Ok((ReadHalf::Unix(reader), WriteHalf::Unix(writer)))
            }
            #[cfg(feature = "rustls")]
            Self::Tls(host, port, connector) => {
                let half = tls::Half::of(connector.connect(tcp(host, *port).await?).await?);
                Ok((ReadHalf::Tls(half.clone()), WriteHalf::Tls(half)))
            }
        }
    }
}

/// Strips the brackets around an IPv6 address: URLs have them, and nothing else accepts them.
pub(crate) fn bare(host: &str) -> &str {
    host.strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(host)
}

async fn tcp(host: &str, port: u16) -> io::Result<TcpStream> {
    let stream = reach::connect(host, port).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// The half to read from.
#[derive(Debug)]
pub(crate) enum ReadHalf {
    Tcp(tcp::OwnedReadHalf),
    #[cfg(unix)]
    Unix(unix::OwnedReadHalf),
    #[cfg(feature = "rustls")]
    Tls(tls::Half),
    #[cfg(test)]
    Played(tokio::io::ReadHalf<tokio::io::DuplexStream>),
}

/// The half to write to.
#[derive(Debug)]
pub(crate) enum WriteHalf {
    Tcp(tcp::OwnedWriteHalf),
    #[cfg(unix)]
    Unix(unix::OwnedWriteHalf),
    #[cfg(feature = "rustls")]
    Tls(tls::Half),
    #[cfg(test)]
    Played(tokio::io::WriteHalf<tokio::io::DuplexStream>),
}

impl ReadHalf {
    pub(crate) fn as_read(&mut self) -> &mut (dyn AsyncRead + Send + Unpin) {
        match self {
            Self::Tcp(half) => half,
            #[cfg(unix)]
            Self::Unix(half) => half,
            #[cfg(feature = "rustls")]
            Self::Tls(half) => half,
            #[cfg(test)]
            Self::Played(half) => half,
        }
    }

    /// Returns whether the socket has unread bytes, its end, or an error. It queries the system,
    /// since the runtime may be too busy to know.
    pub(crate) fn has_more(&self) -> bool {
        let peek = |socket: SockRef<'_>| match socket.peek(&mut [MaybeUninit::uninit()]) {
            Ok(_) => true,
            Err(error) => error.kind() != io::ErrorKind::WouldBlock,
        };
        match self {
            Self::Tcp(half) => peek(SockRef::from(AsRef::<TcpStream>::as_ref(half))),
            #[cfg(unix)]
            Self::Unix(half) => peek(SockRef::from(AsRef::<UnixStream>::as_ref(half))),
            #[cfg(feature = "rustls")]
            Self::Tls(half) => half.on_socket(|socket| peek(SockRef::from(socket))),
            #[cfg(test)]
            Self::Played(_) => false,
        }
    }
}

impl WriteHalf {
    /// Returns whether an error leaves open how many of the bytes given to the socket were sent.
    pub(crate) fn hides_what_it_sent(&self) -> bool {
        match self {
            // TLS has accepted all bytes, and sends them one record at a time
            #[cfg(feature = "rustls")]
            Self::Tls(_) => true,
            _ => false,
        }
    }

    pub(crate) fn as_write(&mut self) -> &mut (dyn AsyncWrite + Send + Unpin) {
        match self {
            Self::Tcp(half) => half,
            #[cfg(unix)]
            Self::Unix(half) => half,
            #[cfg(feature = "rustls")]
            Self::Tls(half) => half,
            #[cfg(test)]
            Self::Played(half) => half,
        }
    }
}

/// Moves both halves to the runtime in whose context this is called. Nothing that was sent or
/// received is lost.
///
/// # Panics
///
/// If that runtime has no I/O.
pub(crate) fn moved_here(reader: ReadHalf, writer: WriteHalf) -> io::Result<(ReadHalf, WriteHalf)> {
    let strangers = || io::Error::other("halves of two streams");
    match (reader, writer) {
        (ReadHalf::Tcp(reader), WriteHalf::Tcp(writer)) => {
            let stream = reader.reunite(writer).map_err(|_| strangers())?;
            let (reader, writer) = TcpStream::from_std(stream.into_std()?)?.into_split();
            Ok((ReadHalf::Tcp(reader), WriteHalf::Tcp(writer)))
        }
        #[cfg(unix)]
        (ReadHalf::Unix(reader), WriteHalf::Unix(writer)) => {
            let stream = reader.reunite(writer).map_err(|_| strangers())?;
            let (reader, writer) = UnixStream::from_std(stream.into_std()?)?.into_split();
            Ok((ReadHalf::Unix(reader), WriteHalf::Unix(writer)))
        }
        #[cfg(feature = "rustls")]
        (ReadHalf::Tls(reader), WriteHalf::Tls(writer)) => {
            reader.move_here()?;
            Ok((ReadHalf::Tls(reader), WriteHalf::Tls(writer)))
        }
        #[cfg(test)]
        (ReadHalf::Played(reader), WriteHalf::Played(writer)) => {
            Ok((ReadHalf::Played(reader), WriteHalf::Played(writer)))
        }
        #[cfg(any(unix, test, feature = "rustls"))]
        _ => Err(strangers()),
    }
}

/// Returns whether the runtime in whose context this is called has I/O. tokio has no query for
/// that: it panics if there is none. If panics abort the process, the result is `false` without a
/// test.
pub(crate) fn has_io_here() -> bool {
    #[cfg(unix)]
    let probe = || drop(UnixStream::pair());
    #[cfg(not(unix))]
    let probe =
        || drop(std::net::UdpSocket::bind("127.0.0.1:0").map(tokio::net::UdpSocket::from_std));
    cfg!(panic = "unwind") && std::panic::catch_unwind(probe).is_ok()
}

/// TLS by rustls, as set in fred's configuration.
#[cfg(feature = "rustls")]
pub(crate) mod tls {
    use std::{
        io,
        pin::Pin,
        sync::{Arc, Mutex, MutexGuard, PoisonError},
        task::{Context, Poll},
    };

    use tokio::{
        io::{AsyncRead, AsyncWrite, ReadBuf},
        net::TcpStream,
    };
    use tokio_rustls::{TlsConnector, client::TlsStream, rustls::pki_types::ServerName};

    /// A stream shared by reader and writer, because TLS may have to write in order to read, and
    /// vice versa.
    #[derive(Debug, Clone)]
    pub(crate) struct Half(Arc<Mutex<TlsStream<Movable>>>);

    impl Half {
        pub(crate) fn of(stream: TlsStream<Movable>) -> Self {
            Self(Arc::new(Mutex::new(stream)))
        }

        fn stream(&self) -> MutexGuard<'_, TlsStream<Movable>> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }

        pub(crate) fn move_here(&self) -> io::Result<()> {
            let mut stream = self.stream();
            let socket = &mut stream.get_mut().0.0;
            let lost_before = || io::Error::from(io::ErrorKind::NotConnected);
            *socket = Some(TcpStream::from_std(
                socket.take().ok_or_else(lost_before)?.into_std()?,
            )?);
            Ok(())
        }

        /// Runs a check on the socket itself. Returns `false` if the socket was lost in a move.
        pub(crate) fn on_socket(&self, ask: impl FnOnce(&TcpStream) -> bool) -> bool {
            self.stream().get_ref().0.0.as_ref().is_some_and(ask)
        }
    }

    impl AsyncRead for Half {
        fn poll_read(
            self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buf: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            Pin::new(&mut *self.stream()).poll_read(cx, buf)
        }
    }

    impl AsyncWrite for Half {
        fn poll_write(
            self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buf: &[u8],
        ) -> Poll<io::Result<usize>> {
            Pin::new(&mut *self.stream()).poll_write(cx, buf)
        }

        fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut *self.stream()).poll_flush(cx)
        }

        fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut *self.stream()).poll_shutdown(cx)
        }
    }

    /// The TLS configuration, and the name that the server's certificate must have.
    #[derive(Clone)]
    pub(crate) struct Connector(pub(crate) TlsConnector, pub(crate) String);

    impl std::fmt::Debug for Connector {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_tuple("Connector").field(&self.1).finish()
        }
    }

    impl Connector {
        pub(crate) async fn connect(&self, stream: TcpStream) -> io::Result<TlsStream<Movable>> {
            let name = ServerName::try_from(self.1.clone()).map_err(io::Error::other)?;
            self.0.connect(name, Movable(Some(stream))).await
        }
    }

    /// A socket inside a TLS stream. It cannot be taken out of the stream, so a move replaces it
    /// here.
    #[derive(Debug)]
    pub(crate) struct Movable(Option<TcpStream>);

    impl Movable {
        /// Returns the socket, or an error if it was lost in a move.
        fn stream(&mut self) -> io::Result<Pin<&mut TcpStream>> {
            self.0
                .as_mut()
                .map(Pin::new)
                .ok_or(io::ErrorKind::NotConnected.into())
        }
    }

    impl AsyncRead for Movable {
        fn poll_read(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buf: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            self.stream()?.poll_read(cx, buf)
        }
    }

    impl AsyncWrite for Movable {
        fn poll_write(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buf: &[u8],
        ) -> Poll<io::Result<usize>> {
            self.stream()?.poll_write(cx, buf)
        }

        fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            self.stream()?.poll_flush(cx)
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            self.stream()?.poll_shutdown(cx)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_runtime_has() {
        use tokio::runtime::Builder;
        assert!(
            Builder::new_current_thread()
                .enable_io()
                .build()
                .unwrap()
                .block_on(async { has_io_here() })
        );
        assert!(
            !Builder::new_current_thread()
                .enable_time()
                .build()
                .unwrap()
                .block_on(async { has_io_here() })
        );
    }

    #[test]
    fn where_urls_lead() {
        for (url, host, port) in [
            ("redis://[::1]:7000", "::1", 7000),
            ("redis://[2001:db8::7]", "2001:db8::7", 6379),
            ("redis://127.0.0.1:7000/3", "127.0.0.1", 7000),
            ("redis://user:pass@locks.example", "locks.example", 6379),
        ] {
            match Address::of(&FredConfig::from_url(url).unwrap()).unwrap() {
                Address::Tcp(to, at) => assert_eq!((&*to, at), (host, port), "{url}"),
                other => panic!("{url}: {other:?}"),
            }
        }
    }
}
