//! The read half of a connection, and the driver in charge of it.

use bytes::BytesMut;

use crate::{resp, stream::ReadHalf};

/// The read half of the socket, the bytes that have arrived, and the driver in charge of them.
pub(crate) struct Incoming {
    pub(crate) reader: ReadHalf,
    pub(crate) buf: BytesMut,
    /// The progress in decoding the first frame of `buf`, which is still incomplete.
    pub(crate) scan: resp::Scan,
    /// How many bytes `buf` must have before a frame can be decoded.
    pub(crate) needed: usize,
    /// The number of the driver in charge, which is the newest. Driver 1 is on the client's own
    /// thread.
    pub(crate) driver: u64,
    pub(crate) is_on_own_thread: bool,
}

impl Incoming {
    /// Puts driver 1, on the client's own thread, in charge.
    pub(crate) fn new(reader: ReadHalf) -> Self {
        let (buf, scan) = (BytesMut::new(), resp::Scan::default());
        Self {
            reader,
            buf,
            scan,
            needed: 1,
            driver: 1,
            is_on_own_thread: true,
        }
    }

    /// Returns whether bytes were read that may hold an undelivered frame.
    pub(crate) fn is_behind(&self) -> bool {
        self.buf.len() >= self.needed
    }
}
