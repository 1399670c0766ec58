//! The store and the codec of a cache, and the format of its entries.

use std::{error::Error, sync::Arc, time::Duration};

use async_trait::async_trait;
use nestlock::LockGuard;

/// How long a call of the store may take.
pub(super) const STORE_PATIENCE: Duration = Duration::from_secs(3);

/// An error of a store, a codec or a fill.
///
/// For an example, see [`Codec`].
pub type BoxError = Box<dyn Error + Send + Sync>;

/// The store of a cache, shared by all processes.
///
/// ```
/// # use std::{collections::HashMap, sync::Mutex, time::Duration};
/// # use nestlock::LockGuard;
/// # use nestlock_recipes::cached::{BoxError, Store};
/// /// A store for the tests of one process, whose values never expire.
/// #[derive(Default)]
/// struct InMemory(Mutex<HashMap<String, Vec<u8>>>);
///
/// #[async_trait::async_trait]
/// impl Store for InMemory {
///     async fn get(&self, key: &str) -> Result<Option<(Vec<u8>, Duration)>, BoxError> {
///         let value = self.0.lock().unwrap().get(key).cloned();
///         Ok(value.map(|value| (value, Duration::MAX)))
///     }
///
///     async fn set(
///         &self,
///         key: &str,
///         value: Vec<u8>,
///         _ttl: Duration,
///         filler: &LockGuard,
///     ) -> Result<bool, BoxError> {
///         let is_held = !filler.is_lost();
///         if is_held {
///             self.0.lock().unwrap().insert(key.to_owned(), value);
///         }
///         Ok(is_held)
///     }
/// }
/// ```
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// Returns the bytes at this key, and their remaining TTL. If it takes longer than 3 s, the
    /// cache drops the future and returns an error.
    async fn get(&self, key: &str) -> Result<Option<(Vec<u8>, Duration)>, BoxError>;

    /// Stores bytes with this TTL, at least 1 ms, if `filler` still holds its lock. Returns whether
    /// it did. If check and write are two steps, a process that is paused between them overwrites a
    /// newer value.
    async fn set(
        &self,
        key: &str,
        value: Vec<u8>,
        ttl: Duration,
        filler: &LockGuard,
    ) -> Result<bool, BoxError>;
}

/// The conversion of values to bytes.
///
/// ```
/// use nestlock_recipes::cached::{BoxError, Codec};
///
/// struct Text;
///
/// impl Codec for Text {
///     type Value = String;
///
///     fn encode(&self, value: &String) -> Result<Vec<u8>, BoxError> {
///         Ok(value.clone().into_bytes())
///     }
///
///     fn decode(&self, bytes: Vec<u8>) -> Option<String> {
///         String::from_utf8(bytes).ok()
///     }
/// }
/// assert_eq!(Text.decode(b"Ada".to_vec()).as_deref(), Some("Ada"));
/// ```
pub trait Codec: Send + Sync + 'static {
    /// The type of the values. A value is cloned for each caller that waits for its fill.
    type Value: Clone + Send + Sync + 'static;

    /// Encodes a value.
    ///
    /// # Errors
    ///
    /// If the value cannot be encoded. The callers that wait for it get the error, as if the fill
    /// had failed.
    fn encode(&self, value: &Self::Value) -> Result<Vec<u8>, BoxError>;

    /// Decodes a value. Returns `None` if the bytes have another format: the value then counts as
    /// missing, as it does if this panics.
    fn decode(&self, bytes: Vec<u8>) -> Option<Self::Value>;
}

/// Stores values that are bytes, unchanged.
///
/// ```
/// use nestlock_recipes::cached::{Codec, Raw};
///
/// assert_eq!(Raw.decode(vec![1, 2]), Some(vec![1, 2]));
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Raw;

impl Codec for Raw {
    type Value = Vec<u8>;

    fn encode(&self, value: &Vec<u8>) -> Result<Vec<u8>, BoxError> {
        Ok(value.clone())
    }

    fn decode(&self, bytes: Vec<u8>) -> Option<Vec<u8>> {
        Some(bytes)
    }
}

/// Stores values as JSON, by serde.
///
/// ```
/// use nestlock_recipes::cached::{Codec, Json};
///
/// let codec = Json::<Vec<u32>>::new();
/// assert_eq!(codec.encode(&vec![1, 2]).unwrap(), b"[1,2]");
/// assert_eq!(codec.decode(b"[1,2]".to_vec()), Some(vec![1, 2]));
/// ```
#[cfg(feature = "json")]
#[derive(Debug)]
pub struct Json<V>(std::marker::PhantomData<fn() -> V>);

#[cfg(feature = "json")]
impl<V> Json<V> {
    /// Creates a codec for this type.
    #[must_use]
    pub fn new() -> Self {
        Self(std::marker::PhantomData)
    }
}

#[cfg(feature = "json")]
impl<V> Default for Json<V> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(feature = "json")]
impl<V: Clone + Send + Sync + serde::Serialize + serde::de::DeserializeOwned + 'static> Codec
    for Json<V>
{
    type Value = V;

    fn encode(&self, value: &V) -> Result<Vec<u8>, BoxError> {
        Ok(serde_json::to_vec(value)?)
    }

    fn decode(&self, bytes: Vec<u8>) -> Option<V> {
        serde_json::from_slice(&bytes).ok()
    }
}

/// An entry of the cache.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Envelope {
    /// How long the fill took.
    pub(super) took: Duration,
    /// How long the value is served after its end: the last part of its TTL.
    pub(super) stale_for: Duration,
    /// The value; `None` if the fill found none.
    pub(super) value: Option<Vec<u8>>,
}

/// The first byte of an entry: the version of the format (high digit) and the type of the entry.
const VALUE: u8 = 0x11;
const NONE: u8 = 0x12;
const FAILED: u8 = 0x13;
/// The length of the header before the value, in bytes.
const HEADER: usize = 9;

impl Envelope {
    pub(super) fn write(self) -> Vec<u8> {
        let millis = |time: Duration| {
            u32::try_from(time.as_millis())
                .unwrap_or(u32::MAX)
                .to_be_bytes()
        };
        let mut bytes = vec![if self.value.is_some() { VALUE } else { NONE }];
        bytes.extend(millis(self.took));
        bytes.extend(millis(self.stale_for));
        bytes.extend(self.value.unwrap_or_default());
        bytes
    }

    /// Reads an entry. Returns `None` if it has another format.
    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let (&[kind, t0, t1, t2, t3, s0, s1, s2, s3], value) =
            bytes.split_first_chunk::<HEADER>()?;
        let millis = |bytes: [u8; 4]| Duration::from_millis(u32::from_be_bytes(bytes).into());
        let value = match kind {
            VALUE => Some(value.to_vec()),
            NONE => None,
            _ => return None,
        };
        Some(Self {
            took: millis([t0, t1, t2, t3]),
            stale_for: millis([s0, s1, s2, s3]),
            value,
        })
    }
}

/// Returns the entry of a marker, with the message of the fill that failed.
pub(super) fn failure(message: &str) -> Vec<u8> {
    [&[FAILED], message.as_bytes()].concat()
}

/// Reads the message of a marker. Returns `None` if the bytes are not a marker.
pub(super) fn read_failure(bytes: &[u8]) -> Option<Arc<str>> {
    let (&FAILED, message) = bytes.split_first()? else {
        return None;
    };
    Some(String::from_utf8_lossy(message).into())
}

#[cfg(feature = "fred")]
pub use self::redis::RedisStore;

#[cfg(feature = "fred")]
mod redis {
    use std::{pin::pin, sync::Arc, time::Duration};

    use async_trait::async_trait;
    use fred::{
        prelude::{
            Builder, Client, ClientLike, Config, KeysInterface, LuaInterface, ReconnectPolicy,
            Value,
        },
        types::ConnectHandle,
    };
    use futures_util::FutureExt;
    use nestlock::LockGuard;
    use scopeguard::ScopeGuard;

    use super::{BoxError, STORE_PATIENCE, Store};

    /// Writes a value if the record of the lock contains the owner.
    ///
    /// KEYS[1] value, KEYS[2] lock; ARGV[1] bytes, ARGV[2] TTL in milliseconds, ARGV[3] owner.
    /// Returns 1 if written, 0 if not.
    const SET: &str = "\
if redis.call('hexists', KEYS[2], ARGV[3]) == 0 then return 0 end
redis.call('set', KEYS[1], ARGV[1], 'px', ARGV[2])
return 1";

    /// The task that drives the connection, aborted on drop: otherwise it would outlive fred's
    /// client.
    type Driver = ScopeGuard<ConnectHandle, fn(ConnectHandle)>;

    /// Stores values as strings in the Redis server of the locks. Cheap to clone.
    ///
    /// For an example, see [`Cached`].
    ///
    /// [`Cached`]: crate::cached::Cached
    #[derive(Debug, Clone)]
    pub struct RedisStore {
        client: Client,
        /// `None` if the user made the client.
        own: Option<Arc<Driver>>,
    }

    impl RedisStore {
        /// Creates a store over a fred client that is connected to the server and the database of
        /// the locks. Give it a `ReconnectPolicy`: without one, fred does not reconnect.
        #[must_use]
        pub fn new(client: Client) -> Self {
            Self { client, own: None }
        }

        /// Creates a store with its own client, which reconnects if necessary. The connection ends
        /// with the last clone of the store, or by [`shutdown`](Self::shutdown).
        ///
        /// # Errors
        ///
        /// An error of fred if the URL is invalid, or the server does not reply.
        ///
        /// # Cancel safety
        ///
        /// Cancel safe.
        pub async fn connect(url: impl AsRef<str>) -> Result<Self, fred::error::Error> {
            let mut builder = Builder::from_config(Config::from_url(url.as_ref())?);
            builder.set_policy(ReconnectPolicy::new_exponential(0, 50, 1_000, 2));
            // a request without a reply fails after this time, and is not sent later
            builder.with_performance_config(|config| {
                config.default_command_timeout = STORE_PATIENCE;
            });
            let client = builder.build()?;
            let mut connected = pin!(client.wait_for_connect());
            // subscribe before the client connects: fred reports a connection only once, and
            // between its check of the state and its subscription this future could miss that
            // report and wait forever
            let _ = connected.as_mut().now_or_never();
            let mut own: Driver = scopeguard::guard(client.connect(), |task| task.abort());
            tokio::select! {
                connected = connected => connected?,
                ended = &mut *own => ended??,
            }
            Ok(Self {
                client: client.clone(),
                own: Some(Arc::new(own)),
            })
        }

        /// Closes the connection of a store from [`connect`](Self::connect), even if clones remain:
        /// for example at the shutdown of the lock client. From then on all calls fail.
        pub fn shutdown(&self) {
            if let Some(own) = &self.own {
                own.abort();
            }
        }
    }

    #[async_trait]
    impl Store for RedisStore {
        async fn get(&self, key: &str) -> Result<Option<(Vec<u8>, Duration)>, BoxError> {
            // one round trip; if the value is replaced between the two commands, it only seems
            // younger than it is
            let pipeline = self.client.pipeline();
            pipeline.get::<(), _>(key).await?;
            pipeline.pttl::<(), _>(key).await?;
            let (value, ttl): (Value, i64) = pipeline.all().await?;
            Ok(match (value.as_bytes(), ttl) {
                (None, _) | (_, -2) => None,
                (Some(bytes), ttl) => {
                    // another program stored it without a TTL
                    let ttl = u64::try_from(ttl).map_or(Duration::MAX, Duration::from_millis);
                    Some((bytes.to_vec(), ttl))
                }
            })
        }

        async fn set(
            &self,
            key: &str,
            value: Vec<u8>,
            ttl: Duration,
            filler: &LockGuard,
        ) -> Result<bool, BoxError> {
            let ttl = i64::try_from(ttl.as_millis().max(1)).unwrap_or(i64::MAX);
            let owner = filler.owner().as_str().to_owned();
            let arguments: Vec<Value> =
                vec![value.into_boxed_slice().into(), ttl.into(), owner.into()];
            let written: i64 = self
                .client
                .eval(SET, vec![key, filler.name()], arguments)
                .await?;
            Ok(written == 1)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        for value in [None, Some(vec![]), Some(b"text".to_vec())] {
            let envelope = || Envelope {
                took: Duration::from_millis(400),
                stale_for: Duration::from_secs(60),
                value: value.clone(),
            };
            assert_eq!(Envelope::read(&envelope().write()), Some(envelope()));
        }
    }

    #[test]
    fn what_others_wrote_is_missing() {
        for bytes in [&b""[..], b"text", b"longer text", &[VALUE; 8], &[0; 9]] {
            assert_eq!(Envelope::read(bytes), None, "{bytes:?}");
        }
    }

    #[test]
    fn long_times_are_cut() {
        let long = Envelope {
            took: Duration::MAX,
            stale_for: Duration::MAX,
            value: None,
        };
        let most = Duration::from_millis(u32::MAX.into());
        assert_eq!(
            Envelope::read(&long.write()),
            Some(Envelope {
                took: most,
                stale_for: most,
                value: None
            })
        );
    }

    #[cfg(feature = "json")]
    #[test]
    fn json_of_another_type_is_missing() {
        let numbers = Json::<Vec<u32>>::new();
        let bytes = numbers.encode(&vec![1, 2]).unwrap();
        assert_eq!(numbers.decode(bytes.clone()), Some(vec![1, 2]));
        assert_eq!(Json::<String>::new().decode(bytes), None);
    }
}
