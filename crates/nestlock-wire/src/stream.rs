//! Opens connections to servers. The two halves of a connection can move from one runtime to
//! another.

use std::{io, mem::MaybeUninit};

use socket2::SockRef;
#[cfg(unix)]
use tokio::net::{UnixStream, unix};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, tcp},
};

use crate::{address::Address, reach, settings::ServerSettings};

/// Connects to a server. The socket belongs to the runtime that polls this.
pub(crate) async fn open(server: &ServerSettings) -> io::Result<(ReadHalf, WriteHalf)> {
    #[cfg(feature = "fred")]
    if server.is_by_freds_tls() {
        let why = "the configuration asks for TLS that only fred's client speaks; use that client (wire=fred), or enable the feature `rustls`";
        return Err(io::Error::other(why));
    }
    match &server.address {
        Address::Tcp(at) => {
            let stream = tcp(at.bare_host(), at.port).await?;
            #[cfg(feature = "rustls")]
            if let Some(tls) = &server.tls {
                let half = tls::Half::of(
                    tls::connect(&tls.connector, server.tls_name(at), at, stream).await?,
                );
                return Ok((ReadHalf::Tls(half.clone()), WriteHalf::Tls(half)));
            }
            let (reader, writer) = stream.into_split();
            Ok((ReadHalf::Tcp(reader), WriteHalf::Tcp(writer)))
        }
        #[cfg(unix)]
        Address::Unix(path) => {
            let (reader, writer) = UnixStream::connect(path).await?.into_split();
            Ok((ReadHalf::Unix(reader), WriteHalf::Unix(writer)))
        }
        #[cfg(not(unix))]
        Address::Unix(_) => Err(io::Error::other("this system has no Unix sockets")),
    }
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
    let strangers = || io::Error::other("the halves belong to different streams");
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
///
/// ```
/// # fn main() -> std::io::Result<()> {
/// use tokio::runtime::Builder;
///
/// let runtime = Builder::new_current_thread().enable_io().build()?;
/// let _context = runtime.enter();
/// assert!(nestlock_wire::has_io_here());
/// # Ok(())
/// # }
/// ```
#[must_use]
pub fn has_io_here() -> bool {
    #[cfg(unix)]
    let probe = || drop(UnixStream::pair());
    #[cfg(not(unix))]
    let probe =
        || drop(std::net::UdpSocket::bind("127.0.0.1:0").map(tokio::net::UdpSocket::from_std));
    cfg!(panic = "unwind") && std::panic::catch_unwind(probe).is_ok()
}

/// TLS by rustls.
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

    use crate::address::{Server, bare};

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

    /// Performs the TLS handshake with a server.
    pub(crate) async fn connect(
        connector: &TlsConnector,
        name: Option<Arc<str>>,
        server: &Server,
        stream: TcpStream,
    ) -> io::Result<TlsStream<Movable>> {
        let name = name.as_deref().unwrap_or(&server.host);
        let name = ServerName::try_from(bare(name).to_owned()).map_err(io::Error::other)?;
        connector.connect(name, Movable(Some(stream))).await
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
}
