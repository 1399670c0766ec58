//! Requests, and how they are encoded.

use crate::{
    bundle::{Bundle, ONE},
    resp,
    script::{Arg, Call},
    texts::Texts,
};

/// A request.
///
/// For an example, see [`Connection`].
///
/// [`Connection`]: crate::Connection
#[derive(Debug, Clone, Copy)]
pub enum Request<'r> {
    /// EVALSHA, or EVAL the first time, and whether messages are sharded.
    Digest(&'r Call, bool),
    /// The same with plain messages; it may be sent with others of its bundle.
    Together(&'r Call),
    /// EVAL, and whether messages are sharded.
    Source(&'r Call, bool),
    /// ASKING and EVAL, and whether messages are sharded.
    Asking(&'r Call, bool),
    /// A command and its arguments, sent once.
    Words(&'r [&'r str]),
}

/// A command about channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Channels {
    Subscribe,
    Unsubscribe,
    /// SSUBSCRIBE, one channel at a time.
    SubscribeSharded,
    UnsubscribeSharded,
}

impl Channels {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Subscribe => "SUBSCRIBE",
            Self::Unsubscribe => "UNSUBSCRIBE",
            Self::SubscribeSharded => "SSUBSCRIBE",
            Self::UnsubscribeSharded => "SUNSUBSCRIBE",
        }
    }
}

impl Request<'_> {
    /// Writes the request. Returns how it can be bundled with others, or `None` if it cannot.
    pub(crate) fn encode(
        &self,
        number: u64,
        out: &mut Vec<u8>,
        texts: &mut Texts,
    ) -> Option<BundlePart> {
        match self {
            Self::Digest(call, sharded) => {
                let (text, digest) = call.script.text(*sharded);
                let (verb, script) = texts.verb(text, digest);
                call.encode(verb, script, number, out);
            }
            Self::Together(call) => {
                let (text, digest) = call.script.text(false);
                match texts.verb(text, digest) {
                    ("EVAL", text) => call.encode("EVAL", text, number, out),
                    (_, digest) => return call.encode_part(digest, number, out),
                }
            }
            Self::Source(call, sharded) => {
                let (verb, text) = texts.again(call.script.text(*sharded).0);
                call.encode(verb, text, number, out);
            }
            Self::Asking(call, sharded) => {
                Self::Words(&["ASKING"]).encode(number, out, texts);
                Self::Source(call, *sharded).encode(number, out, texts);
            }
            Self::Words(words) => {
                resp::write_head(out, words.len());
                for word in *words {
                    resp::write_word(out, word.as_bytes());
                }
            }
        }
        None
    }
}

impl Call {
    pub(crate) fn encode_part(
        &self,
        digest: &str,
        number: u64,
        out: &mut Vec<u8>,
    ) -> Option<BundlePart> {
        let begin = out.len();
        self.encode_head("EVALSHA", digest, out);
        let key = out.len();
        self.encode_keys(out);
        let args = out.len();
        self.encode_args(out);
        let end = out.len();
        resp::write_integer(out, number);
        let bundle = self.script.bundle?;
        // with other numbers, the bundle would misread where the next call begins
        if (self.keys.len(), self.args.len()) != ONE {
            return None;
        }
        let digit = bundle.digit(&self.script.source)?;
        let [key, args, number] = [key, args, end].map(|at| (at - begin) as u32);
        Some(BundlePart {
            bundle,
            digit,
            key,
            args,
            number,
        })
    }

    fn encode(&self, verb: &str, script: &str, number: u64, out: &mut Vec<u8>) {
        self.encode_head(verb, script, out);
        self.encode_keys(out);
        self.encode_args(out);
        resp::write_integer(out, number);
    }

    fn encode_head(&self, verb: &str, script: &str, out: &mut Vec<u8>) {
        resp::write_head(out, 4 + self.keys.len() + self.args.len());
        resp::write_word(out, verb.as_bytes());
        resp::write_word(out, script.as_bytes());
        resp::write_integer(out, self.keys.len() as u64);
    }

    fn encode_keys(&self, out: &mut Vec<u8>) {
        for key in &self.keys {
            resp::write_word(out, key.as_bytes());
        }
    }

    fn encode_args(&self, out: &mut Vec<u8>) {
        for arg in &self.args {
            match arg {
                Arg::Text(text) => resp::write_word(out, text.as_bytes()),
                Arg::Derived(name) => resp::write_parts(out, &(self.script.derive)(name)),
                Arg::Number(number) => resp::write_integer(out, *number),
                Arg::Bytes(bytes) => resp::write_word(out, bytes),
            }
        }
    }
}

/// A request's part in a bundle: offsets into its bytes, from its first byte.
pub(crate) struct BundlePart {
    pub(crate) bundle: &'static Bundle,
    /// The digit that names its script within the bundle.
    pub(crate) digit: u8,
    /// Where the key and the arguments begin.
    pub(crate) key: u32,
    pub(crate) args: u32,
    /// Where the request's number begins.
    pub(crate) number: u32,
}
