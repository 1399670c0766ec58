//! The client, its builder, and one constructor for each lock kind.

use std::{sync::Arc, time::Duration};

#[cfg(doc)]
use crate::error::Error;
#[cfg(feature = "metrics")]
use crate::meter::Meter;
use nestlock_wire::{CredentialSource, Credentials, Login};

use crate::{
    engine::{self, Anchor, ClientStats, Kind},
    error::Result,
    keys::LockName,
    lock::{
        CountDownLatch, Fair, Fenced, FencedKey, Lock, MultiLock, Permits, ReadSide, ReadWriteLock,
        RedLock, RedLockOptions, RedMembers, Reentrant, Semaphore, Signal, Spin, StringRecord,
        WriteSide,
    },
    options::{Backoff, Config, Messages, SignalOptions, Tuning},
    owner::OwnerId,
    store::{self, Endpoint},
    token::FencingToken,
    topology::Topology,
};

/// A client of one Redis or Valkey server, a cluster, or the master of a service; it creates locks.
/// Cheap to clone.
///
/// The client owns one background thread and, to a single server, two connections. The thread
/// renews leases, wakes waiters and releases dropped guards, even while the caller's runtime is
/// blocked. Locks and guards keep the client alive; dropping the last of them ends it.
///
/// Dropping the last handle never blocks a thread of a runtime: the client's thread performs the
/// pending releases. The *end of the runtime* waits for them, for at most half a second, so that a
/// program that exits next does not lose them. Outside a runtime, the drop itself waits. Await
/// [`shutdown`](Self::shutdown) to wait for all of them and to learn what was not released.
///
/// Each client has its own identity: two clients never re-enter each other's locks, not even in one
/// process.
///
/// ```no_run
/// # async fn example() -> nestlock::Result<()> {
/// use nestlock::LockClient;
///
/// let client = LockClient::connect("redis://127.0.0.1:6379").await?;
/// let guard = client.mutex("order:42")?.lock().await?;
/// // one holder at a time, across all processes
/// guard.unlock().await?;
/// client.shutdown().await
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct LockClient {
    anchor: Arc<Anchor>,
}

impl LockClient {
    /// Connects with the default configuration.
    ///
    /// The URL is `redis://[[user]:password@]host[:port][/database]`, `rediss://` for TLS (feature
    /// `rustls`), `redis+unix://[[user]:password@]/path/to/socket`,
    /// `redis-cluster://[login@]a,b,c[/database]`,
    /// `redis-sentinel://[login@]a,b,c/service[/database]`, or `redis://a,b` for a service with
    /// several addresses: see [the guide](crate::guide::configuration). The client rejects a URL
    /// that it does not fully understand.
    ///
    /// On a runtime without I/O (`enable_io` was not called) the program's panic hook runs once,
    /// because tokio reports this only by a panic, which the client catches.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidConfig`] for an invalid URL, or one that addresses a sentinel as if it were
    /// a server; [`Error::Connect`], with the address, if the server does not reply within the
    /// connect timeout (5 s) or rejects the login, or if there is no master. The error includes the
    /// reply of each server that was tried.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: if dropped midway, the connection is closed.
    pub async fn connect(url: impl AsRef<str>) -> Result<Self> {
        Self::builder().connect(url).await
    }

    /// Creates a client that connects on first use, so that the program can start without a server.
    /// Sends nothing and needs no runtime.
    ///
    /// The first call that needs a server connects, and fails as [`connect`](Self::connect) does:
    /// each call fails with [`Error::Connect`] until a connection succeeds, and a wait keeps
    /// trying, as in any outage. Call [`ready`](Self::ready) to find out earlier. After the first
    /// connection the client behaves like any other.
    ///
    /// Replies are read by the runtime that makes this call, if there is one, otherwise by the
    /// client's own thread. Starting that thread takes less than a millisecond.
    ///
    /// ```no_run
    /// use std::sync::LazyLock;
    ///
    /// use nestlock::LockClient;
    ///
    /// static LOCKS: LazyLock<LockClient> = LazyLock::new(|| {
    ///     LockClient::connect_lazy("redis://127.0.0.1:6379").expect("the URL is valid")
    /// });
    ///
    /// # async fn example() -> nestlock::Result<()> {
    /// let guard = LOCKS.mutex("orders:42")?.lock().await?; // connects
    /// guard.unlock().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidConfig`] for an invalid URL; [`Error::Connect`] if the system cannot start a
    /// thread.
    pub fn connect_lazy(url: impl AsRef<str>) -> Result<Self> {
        Self::builder().connect_lazy(url)
    }

    /// Connects if necessary, and checks that every server that locks use (in a cluster, each
    /// master) replies. For readiness probes. [`topology`](Self::topology) lists those servers.
    ///
    /// # Errors
    ///
    /// [`Error::Connect`] if there is no connection, or no reply within the command timeout;
    /// [`Error::InvalidConfig`] as for [`connect`](Self::connect), if the client is
    /// [lazy](Self::connect_lazy).
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: it changes nothing.
    pub async fn ready(&self) -> Result<()> {
        self.anchor.connected(None).await?;
        self.anchor.store.check_reachable().await
    }

    /// Returns a builder with the default configuration.
    pub fn builder() -> LockClientBuilder {
        LockClientBuilder {
            config: Config::default(),
            credentials: None,
            #[cfg(feature = "rustls")]
            tls: None,
        }
    }

    /// Returns the mutex with this name: each acquire is a separate owner, as with
    /// `tokio::sync::Mutex`. If in doubt, use this.
    ///
    /// The guard holds the lock, wherever it is moved. Every other acquire waits, even one by the
    /// task that locked: [`hold_count`](Lock::hold_count) of [`current_owner`](Self::current_owner)
    /// is 0 while that task holds the lock. If functions that take the lock call each other, use
    /// [`reentrant_lock`](Self::reentrant_lock): it uses the same record, so a mutex and a
    /// reentrant lock with one name exclude each other.
    ///
    /// Sends nothing. All locks with one name are the same lock.
    ///
    /// ```no_run
    /// # async fn example(client: nestlock::LockClient, jobs: Vec<u64>) -> nestlock::Result<()> {
    /// // one worker for each job, over all processes
    /// for job in jobs {
    ///     if let Some(guard) = client.mutex(format!("job:{job}"))?.try_lock().await? {
    ///         tokio::spawn(async move {
    ///             // work
    ///             guard.unlock().await
    ///         });
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`] if the name is empty, longer than
    /// [`max_name_len`](LockClientBuilder::max_name_len), or a key that locks use internally
    /// (`redisson_...`, `nestlock_...`, `lock-signal:...`, `...:rwlock_timeout:...`,
    /// `{...}:timeout`; the prefix counts), or if its braces would put the lock and its channel into different slots of a
    /// cluster.
    pub fn mutex(&self, name: impl AsRef<str>) -> Result<Lock> {
        Ok(self.reentrant_lock(name)?.owner_per_acquire())
    }

    /// Returns the reentrant lock with this name, for nested critical sections of one task.
    /// Redisson's `RLock`.
    ///
    /// The task that holds the lock may take it again, and holds it until all its guards are gone.
    /// **A guard handed to another task is still owned by the task that locked:** a task that locks
    /// in a loop and moves each guard into `tokio::spawn` gets all guards at once. Use
    /// [`mutex`](Self::mutex) there.
    ///
    /// ```no_run
    /// # async fn example(client: nestlock::LockClient) -> nestlock::Result<()> {
    /// let account = client.reentrant_lock("account:7")?;
    /// let outer = account.lock().await?;
    /// let inner = account.lock().await?; // the same task: counts
    /// inner.unlock().await?;
    /// outer.unlock().await
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`mutex`](Self::mutex).
    pub fn reentrant_lock(&self, name: impl AsRef<str>) -> Result<Lock> {
        Ok(Lock::new(
            &self.anchor,
            Reentrant::new(&self.name(name.as_ref())?),
        ))
    }

    /// Returns the fenced lock with this name, whose guards carry an increasing token. Redisson's
    /// `RFencedLock`.
    ///
    /// [`LockGuard::fencing_token`](crate::LockGuard::fencing_token) is higher than that of every
    /// earlier holder, and the same for all holds of one owner. Pass it to the guarded resource,
    /// and let the resource reject any token lower than the highest it has seen. A paused holder
    /// can then do no harm, however late it wakes up. For values in Redis,
    /// [`LockClient::fenced_get`] and [`LockClient::fenced_set`] do this check; in SQL it is one
    /// more condition, `... AND fence <= ?`.
    ///
    /// The record is that of the reentrant lock, so locks of both kinds with one name exclude each
    /// other. A hold taken as a reentrant lock has no token.
    ///
    /// # Lifetime of the token
    ///
    /// The key `redisson_lock_token:{name}` keeps the last token: one small key per name, without a
    /// TTL. If it is missing, Redisson starts at 1 again; nestlock starts at the server's time in
    /// microseconds, which is above all tokens issued before, even after `FLUSHALL` and evictions.
    /// If only nestlock uses a name, you may delete its token key at any time.
    ///
    /// Tokens can go back if the server forgets an increment (a failover that loses writes, an
    /// older snapshot), if its clock goes back while the key is missing, and if another program
    /// writes or deletes the key.
    ///
    /// # Errors
    ///
    /// As [`LockClient::mutex`]; also for a name that is entirely in braces, `{x}`, whose token
    /// would be that of `x`. An acquire fails if the token key has another type
    /// ([`Error::WrongType`]) or contains no token ([`Error::Store`]).
    pub fn fenced_lock(&self, name: impl AsRef<str>) -> Result<Lock> {
        Ok(Lock::new(
            &self.anchor,
            Fenced::new(&self.name(name.as_ref())?.with_keys()?),
        ))
    }

    /// Returns the fair lock with this name: first come, first served, in the order in which the
    /// server received the requests of all processes. Redisson's `RFairLock`.
    ///
    /// A waiter that is silent for the client's [`fair_patience`](LockClientBuilder::fair_patience)
    /// loses its place. A waiter whose future is polled re-checks the lock often enough to keep its
    /// place; one that is not polled is silent. If the surrounding code may be busy, wait in a
    /// separate task. A try without a wait does not join the queue, and gets the lock only if there
    /// are no waiters. Do not mix this kind with others under one name: a reentrant lock does not
    /// see the queue. An owner that holds a name as a fair lock cannot take it as another kind, or
    /// vice versa ([`Error::NotReentrant`]).
    ///
    /// # Errors
    ///
    /// As [`LockClient::mutex`]; also for a name that is entirely in braces, `{x}`, whose queue
    /// would be that of `x`.
    pub fn fair_lock(&self, name: impl AsRef<str>) -> Result<Lock> {
        Ok(Lock::new(&self.anchor, self.fair(name.as_ref())?))
    }

    /// Returns the non-reentrant fair lock with this name: its owner cannot take it again.
    /// Redisson's `NonReentrantFairLock`.
    ///
    /// # Errors
    ///
    /// As [`LockClient::fair_lock`].
    pub fn non_reentrant_fair_lock(&self, name: impl AsRef<str>) -> Result<Lock> {
        Ok(Lock::new(
            &self.anchor,
            self.fair(name.as_ref())?.not_reentrant(),
        ))
    }

    fn fair(&self, name: &str) -> Result<Fair> {
        Ok(Fair::new(
            &self.name(name)?.with_keys()?,
            self.anchor.config.fair_patience,
            self.anchor.config.tuning.grants,
        ))
    }

    /// Returns the read-write lock with this name: many readers, or one writer. Redisson's
    /// `RReadWriteLock`.
    ///
    /// A waiting writer holds back new readers, so it waits only for the current ones. The readers
    /// of Redisson clients ignore waiting writers.
    ///
    /// # Errors
    ///
    /// As [`LockClient::mutex`]; also for a name that is entirely in braces, `{x}`, whose read
    /// holds would be those of `x`.
    pub fn read_write_lock(&self, name: impl AsRef<str>) -> Result<ReadWriteLock> {
        let name = self.name(name.as_ref())?.with_keys()?;
        let (read, write) = (ReadSide::new(&name), WriteSide::new(&name));
        Ok(ReadWriteLock::new(
            Lock::new(&self.anchor, read),
            Lock::new(&self.anchor, write),
        ))
    }

    /// Returns the permits with this name: at most `total` holders at the same time, over all
    /// processes. Redisson's `RPermitExpirableSemaphore`.
    ///
    /// Permits have leases, which the watchdog renews as it does for locks: those of a process that
    /// died come back by themselves. `total` counts if the name is used for the first time; later,
    /// [`Permits::set_permits`] changes it.
    ///
    /// ```no_run
    /// # async fn example(client: nestlock::LockClient) -> nestlock::Result<()> {
    /// let exports = client.permits("exports", 3)?;
    /// match exports.try_acquire().await? {
    ///     Some(guard) => guard.unlock().await, // after the export
    ///     None => Ok(()), // three run already
    /// }
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`LockClient::mutex`]; also for a name that is entirely in braces, `{x}`, whose leases
    /// would be those of `x`, and for `lock:...`. [`Error::InvalidCount`] if `total` is 0 or above 2,147,483,647.
    pub fn permits(&self, name: impl AsRef<str>, total: u32) -> Result<Permits> {
        let name = self.name(name.as_ref())?.with_keys()?.not_of_signals()?;
        Permits::new(&self.anchor, &name, total)
    }

    /// Returns the semaphore with this name: a number of permits that any process may change. Redisson's
    /// `RSemaphore`. If in doubt, use [`permits`](Self::permits).
    ///
    /// ```no_run
    /// # async fn example(client: nestlock::LockClient) -> nestlock::Result<()> {
    /// let slots = client.semaphore("slots")?;
    /// slots.try_set_permits(3).await?; // unless another process has
    /// let guard = slots.acquire_many(2).await?;
    /// guard.unlock().await
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`LockClient::mutex`]; also for a name that is entirely in braces, `{x}`, whose leases
    /// would be those of `x`, and for `lock:...`.
    pub fn semaphore(&self, name: impl AsRef<str>) -> Result<Semaphore> {
        let name = self.name(name.as_ref())?.with_keys()?.not_of_signals()?;
        Ok(Semaphore::new(&self.anchor, &name))
    }

    /// Returns the latch with this name: a count that goes down to zero, and then lets all waiters of all
    /// processes go. Redisson's `RCountDownLatch`.
    ///
    /// ```no_run
    /// # async fn example(client: nestlock::LockClient) -> nestlock::Result<()> {
    /// let ready = client.count_down_latch("run-7:ready")?;
    /// ready.try_set_count(3).await?; // unless another process has
    /// ready.count_down().await?;
    /// ready.wait().await // until three have counted down
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`LockClient::mutex`]; also for a name with braces, and for `lock:...`.
    pub fn count_down_latch(&self, name: impl AsRef<str>) -> Result<CountDownLatch> {
        let name = self
            .name(name.as_ref())?
            .without_braces()?
            .not_of_signals()?;
        Ok(CountDownLatch::new(&self.anchor, &name))
    }

    /// Returns the spin lock with this name and the default [`Backoff`]. Redisson's `RSpinLock`.
    ///
    /// For many locks with short holds: waiters do not subscribe, and a release sends no message.
    /// Waiters retry after pauses, so the lock is not fair, and a wait costs requests. The record
    /// is that of the reentrant lock, so locks of both kinds with one name exclude each other. A
    /// waiter of a reentrant lock notices the release of a spin lock within the poll cap.
    ///
    /// # Errors
    ///
    /// As [`LockClient::mutex`].
    pub fn spin_lock(&self, name: impl AsRef<str>) -> Result<Lock> {
        self.spin_lock_with(name, Backoff::default())
    }

    /// Returns the spin lock with this name and the given back-off.
    ///
    /// # Errors
    ///
    /// As [`LockClient::mutex`].
    pub fn spin_lock_with(&self, name: impl AsRef<str>, backoff: Backoff) -> Result<Lock> {
        Ok(Lock::new(
            &self.anchor,
            Spin::new(&self.name(name.as_ref())?, backoff),
        ))
    }

    /// Returns the string lock with this name: the record of RedLock libraries, on one server.
    ///
    /// The record is one string, written with `SET NX PX` and deleted by comparison with its value.
    /// redsync, node-redlock, RedLock-Hyperf and redis-py use the same record, so locks of those
    /// libraries and of nestlock exclude each other. For several servers use
    /// [`red_lock`](Self::red_lock). The format has no wake-up messages, so waiters retry after
    /// pauses, and no count, so it is not reentrant ([`Error::NotReentrant`]).
    ///
    /// The value is the owner ([`LockGuard::owner`](crate::LockGuard::owner)), or the one set by
    /// [`AcquireOptions::value`](crate::AcquireOptions::value).
    ///
    /// # Errors
    ///
    /// As [`LockClient::mutex`].
    pub fn string_lock(&self, name: impl AsRef<str>) -> Result<Lock> {
        self.string_lock_with(name, Backoff::default())
    }

    /// Returns the string lock with this name and the given back-off.
    ///
    /// # Errors
    ///
    /// As [`LockClient::mutex`].
    pub fn string_lock_with(&self, name: impl AsRef<str>, backoff: Backoff) -> Result<Lock> {
        Ok(Lock::new(
            &self.anchor,
            StringRecord::new(&self.name(name.as_ref())?, backoff),
        ))
    }

    /// Returns the non-reentrant lock with this name: its owner cannot take it again. Redisson's
    /// `NonReentrantLock`.
    ///
    /// If a wait would never end, the call fails with [`Error::NotReentrant`] at once and without a
    /// request, even if the owner holds the name as a reentrant lock. The record and the messages
    /// are those of the reentrant lock, so locks of both kinds with one name exclude each other.
    ///
    /// # Errors
    ///
    /// As [`LockClient::mutex`].
    pub fn non_reentrant_lock(&self, name: impl AsRef<str>) -> Result<Lock> {
        Ok(Lock::new(
            &self.anchor,
            Reentrant::new(&self.name(name.as_ref())?).not_reentrant(),
        ))
    }

    /// Returns the signal lock with this name: the `Lock` of Python's `python-redis-lock`, with the
    /// same keys, so that Python and Rust exclude and wake each other.
    ///
    /// The record is the string `lock:{name}`, whose value is the owner. Each release wakes one
    /// waiter, of any process, through the list `lock-signal:{name}`. The owner cannot take the
    /// lock again ([`Error::NotReentrant`]). Leases are whole seconds on the server: a fraction of
    /// a second counts as one there, but not in [`remaining`](crate::LockGuard::remaining). To
    /// release or extend a hold of a Python process, get its owner from [`Lock::holder`].
    ///
    /// The first wait opens a connection, on which BLPOP waits for all lists of this client. In a
    /// cluster, waiters re-check the lock after pauses instead, from 10 ms up to the poll cap.
    ///
    /// # Errors
    ///
    /// As [`LockClient::mutex`]; in a cluster also [`Error::InvalidName`] for a name without a
    /// `{tag}`: its two keys would be in different slots.
    pub fn signal_lock(&self, name: impl AsRef<str>) -> Result<Lock> {
        self.signal_lock_with(name, SignalOptions::default())
    }

    /// Returns the signal lock with this name and options: records without expiry, signals that
    /// live longer.
    ///
    /// # Errors
    ///
    /// As [`LockClient::signal_lock`].
    pub fn signal_lock_with(&self, name: impl AsRef<str>, options: SignalOptions) -> Result<Lock> {
        let name = self.name(name.as_ref())?;
        let name = if self.anchor.store.is_cluster() {
            name.with_tag()?
        } else {
            name
        };
        Ok(Lock::new(&self.anchor, Signal::new(&name, options)))
    }

    /// Combines several locks, of any kind and client, into one: all or nothing. Redisson's
    /// `RedissonMultiLock`.
    ///
    /// An acquire never waits for one member while it holds another, so processes that list the
    /// same locks in different orders do not block each other. Each member is acquired with the
    /// requested lease. Members on several independent servers are not a quorum: one unreachable
    /// server fails the acquire.
    ///
    /// ```no_run
    /// # async fn example(client: nestlock::LockClient) -> nestlock::Result<()> {
    /// let transfer = client.multi_lock([client.mutex("account:1")?, client.mutex("account:2")?])?;
    /// let guard = transfer.lock().await?;
    /// guard.unlock().await
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`] if there is no member.
    pub fn multi_lock(&self, members: impl IntoIterator<Item = Lock>) -> Result<Lock> {
        Ok(Lock::of_several(MultiLock::new(
            &self.anchor,
            members.into_iter().collect(),
        )?))
    }

    /// Returns the RedLock with this name over independent servers, with one client for each. It is
    /// held while most servers record it, so a minority may fail. It uses the record of redsync,
    /// node-redlock and RedLock-Hyperf, so locks of those libraries and of nestlock exclude each
    /// other.
    ///
    /// The client sends to all servers at once, and waits for each no longer than a part of the TTL
    /// ([`timeout_factor`](RedLockOptions::timeout_factor)); a minority that is dead or hangs costs
    /// nothing beyond that. Each member renews its own record; the lock is lost when most members
    /// are. An acquire without a wait limit ends after [`RedLockOptions::tries`] failed rounds in a
    /// row.
    ///
    /// # What it cannot promise
    ///
    /// A RedLock is only as reliable as its servers' clocks and memory: a server whose clock jumps
    /// ahead, or that forgets a record (restarted without persistence before the TTL is over), can
    /// let a second holder in. Keep such a server down for one TTL. Nothing here stops a paused
    /// holder: only a fencing token can, and independent servers have no common counter for one.
    ///
    /// ```no_run
    /// # async fn example(
    /// #     a: nestlock::LockClient,
    /// #     b: nestlock::LockClient,
    /// #     c: nestlock::LockClient,
    /// # ) -> nestlock::Result<()> {
    /// use nestlock::{LockClient, RedLockOptions};
    ///
    /// let lock = LockClient::red_lock([&a, &b, &c], "invoice:7", RedLockOptions::new())?;
    /// let guard = lock.lock().await?;
    /// guard.unlock().await
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`], [`Error::InvalidLease`]; [`Error::InvalidConfig`] without a server,
    /// for contradictory options, and if two clients use the same server, which would count twice.
    /// The check uses the server's `INFO` at the time each client connected: it misses a server
    /// that does not allow `INFO`, or that was restarted between the two connections.
    pub fn red_lock<'a>(
        clients: impl IntoIterator<Item = &'a Self>,
        name: impl AsRef<str>,
        options: RedLockOptions,
    ) -> Result<Lock> {
        let (mut locks, mut labels, mut anchor) = (Vec::new(), Vec::new(), None);
        for client in clients {
            locks.push(client.string_lock(name.as_ref())?);
            labels.push(client.address().into());
            anchor.get_or_insert(&client.anchor);
        }
        let name = locks.first().map_or("", Lock::name).into();
        Ok(Lock::of_several(RedLock::new(
            anchor,
            name,
            RedMembers { locks, labels },
            options,
            true,
        )?))
    }

    /// Combines any locks into a RedLock, such as reentrant or fair locks of independent servers.
    /// All members are acquired for the calling task. An owner that is set for an acquire belongs
    /// to one client; the other clients reject it.
    ///
    /// This client provides the timers.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidConfig`] without a member, for contradictory options, and if two members are
    /// the same lock on the same server, with the limits described at [`red_lock`](Self::red_lock);
    /// [`Error::InvalidLease`].
    pub fn red_lock_over(
        &self,
        members: impl IntoIterator<Item = Lock>,
        options: RedLockOptions,
    ) -> Result<Lock> {
        let locks: Vec<_> = members.into_iter().collect();
        let labels: Vec<Arc<str>> = locks.iter().map(|lock| lock.name().into()).collect();
        let name = labels.join("+").into();
        Ok(Lock::of_several(RedLock::new(
            Some(&self.anchor),
            name,
            RedMembers { locks, labels },
            options,
            false,
        )?))
    }

    /// Writes a value, unless `key` has seen a higher fencing token than `token`.
    ///
    /// The check and the write are one step on the server. The highest token seen is stored next to
    /// the value, in `nestlock_fence:{key}`, without a TTL. The value is a plain string at `key`;
    /// the client's [`name_prefix`](LockClientBuilder::name_prefix) applies to locks only. As with
    /// `SET`, an existing TTL is removed.
    ///
    /// # What it promises
    ///
    /// The tokens accepted for one key never go back, whatever clocks, pauses and leases do: once
    /// the holder of a higher token has used [`LockClient::fenced_get`] or this method, a lower
    /// token can no longer change anything. This stays so when the lock is no longer held.
    ///
    /// - Until then the lower token may write. If you compute the new value from the old one, read
    ///   it with [`LockClient::fenced_get`], which raises the fence before it reads.
    /// - Every writer must use this method. A plain `SET` is not stopped.
    /// - Each key has its own fence. If the key `nestlock_fence:{key}` is lost (`FLUSHALL`, an
    ///   eviction, a failover that loses writes), the next token is accepted, whatever it is. Keep
    ///   the fence when you delete the value.
    /// - Use the tokens of one lock for one key.
    /// - The key must not hold a lock. A string with a TTL that has no fence may be a lock's record
    ///   and is rejected; one without a TTL is taken over.
    ///
    /// # Errors
    ///
    /// [`Error::StaleToken`]: another owner has held the lock since; nothing was changed.
    /// [`Error::InvalidName`] as for a lock's name, and for `lock:...` and `{...}`;
    /// [`Error::WrongType`] if the key is not a string. [`Error::Store`]: not written.
    /// [`Error::Unconfirmed`]: perhaps written, perhaps later; retry the same value with the same
    /// token, or give up the lock. The client does not retry by itself.
    ///
    /// # Cancel safety
    ///
    /// If dropped before it is polled, nothing happens. If dropped midway, the value may or may not
    /// be written, before or after the next write by the same holder if the connection broke in
    /// between, but never after a higher token was accepted.
    ///
    /// ```no_run
    /// # async fn example(client: nestlock::LockClient) -> nestlock::Result<()> {
    /// let guard = client.fenced_lock("stock")?.lock().await?;
    /// let token = guard.fencing_token().expect("a fenced lock's guard has a token");
    /// let text = client.fenced_get("stock:count", token).await?.unwrap_or_default();
    /// let count: u64 = String::from_utf8_lossy(&text).parse().unwrap_or(0);
    /// client.fenced_set("stock:count", (count + 1).to_string(), token).await?;
    /// guard.unlock().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn fenced_set(
        &self,
        key: impl AsRef<str>,
        value: impl AsRef<[u8]>,
        token: FencingToken,
    ) -> Result<()> {
        let call = self.fenced_key(key.as_ref())?.set(value.as_ref(), token);
        self.anchor.guarded(token, &call).await.map(drop)
    }

    /// Reads the value at `key`, and rejects fencing tokens lower than `token` from then on.
    /// Returns `None` if there is no value.
    ///
    /// For a holder that computes the next value from this one: a write by an earlier holder
    /// happens before this read, or never. See [`LockClient::fenced_set`] for what is promised and
    /// what is not.
    ///
    /// # Errors
    ///
    /// As [`LockClient::fenced_set`].
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: if dropped midway, lower tokens may or may not be rejected.
    pub async fn fenced_get(
        &self,
        key: impl AsRef<str>,
        token: FencingToken,
    ) -> Result<Option<Vec<u8>>> {
        let call = self.fenced_key(key.as_ref())?.get(token);
        self.anchor.guarded(token, &call).await
    }

    fn fenced_key(&self, key: &str) -> Result<FencedKey> {
        // a guarded key is not a lock name: the prefix does not apply
        Ok(FencedKey::new(&LockName::guarded(
            key,
            self.anchor.config.max_name_len,
        )?))
    }

    fn name(&self, name: &str) -> Result<LockName> {
        let config = &self.anchor.config;
        LockName::new(&config.name_prefix, name, config.max_name_len)
    }

    /// Returns the owner of this client with this name, for
    /// [`AcquireOptions::owner`](crate::AcquireOptions::owner): tasks that use the same owner share
    /// its holds. 1 to 128 visible ASCII characters, without `.`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidOwner`].
    pub fn owner(&self, name: impl AsRef<str>) -> Result<OwnerId> {
        OwnerId::named(&self.anchor.client, name.as_ref())
    }

    /// Returns the caller as an owner of locks: the scope, otherwise the tokio task, otherwise the
    /// thread. See [`OwnerId`].
    #[must_use]
    pub fn current_owner(&self) -> OwnerId {
        OwnerId::current(&self.anchor.client)
    }

    /// Returns the server's address as in the URL: host and port, several of them, the sentinels
    /// and the service, or the socket's path. Never the password.
    #[must_use]
    pub fn address(&self) -> &str {
        self.anchor.store.address()
    }

    /// Waits until all background work is done: dropped guards, cancelled calls, lost replies.
    ///
    /// The client retries requests that the server rejects (no replicas, no permission) until the
    /// record has expired. This method waits for that: forever, if a lock has no expiry.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn idle(&self) {
        self.anchor.idle().await;
    }

    /// Cancels waiting acquires, releases every lock that this client holds, and closes the
    /// connections.
    ///
    /// Live guards report [`LossReason::ShutDown`](crate::LossReason::ShutDown). Takes two command
    /// timeouts and 100 ms at most.
    ///
    /// # Errors
    ///
    /// [`Error::Unsettled`] if the server did not confirm every release; those locks expire with
    /// their leases. The shutdown does not wait for releases that the server rejects for good (no
    /// permission, an unknown command).
    ///
    /// # Cancel safety
    ///
    /// Once polled, the locks are given up. If dropped midway, the connections stay open until the
    /// client is dropped.
    pub async fn shutdown(&self) -> Result<()> {
        self.anchor.shutdown().await
    }

    /// Returns the calls for operators, on locks of other owners. Sends nothing.
    #[must_use]
    pub fn maintenance(&self) -> Maintenance<'_> {
        Maintenance { client: self }
    }

    /// Returns the servers that this client uses now, as far as it knows. Sends nothing. For
    /// display and logs.
    ///
    /// ```no_run
    /// # async fn example(client: nestlock::LockClient) {
    /// println!("{}", client.topology()); // 127.0.0.1:7000: master of 0-5460, connected, for 12 s
    /// # }
    /// ```
    #[must_use]
    pub fn topology(&self) -> Topology {
        self.anchor.store.topology()
    }

    /// Returns the sizes of what this client keeps in memory for its locks. For tests and metrics.
    #[must_use]
    pub fn stats(&self) -> ClientStats {
        self.anchor.stats()
    }
}

/// Calls for operators, on locks of other owners: see [`LockClient::maintenance`].
///
/// ```
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = nestlock_embedded::EmbeddedServer::start()?;
/// # let client = nestlock::LockClient::connect(server.url()).await?;
/// // a worker has ended without a release
/// client.signal_lock("nightly")?.lock().await?.leave_to_lease();
/// let freed = client.maintenance().reset_all_signal_locks().await?;
/// assert_eq!(freed, 1);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Maintenance<'a> {
    client: &'a LockClient,
}

impl Maintenance<'_> {
    /// Frees every signal lock whose name starts with this client's prefix, whatever its owner, and
    /// wakes a waiter of each; returns how many were held. python-redis-lock's `reset_all`, by
    /// `SCAN` instead of `KEYS`.
    ///
    /// For the start of a service, when no worker is running: locks taken during the call may or
    /// may not be freed. Every string at a key `lock:...` counts as a signal lock; names that are
    /// not UTF-8 are left alone.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] and [`Error::Unconfirmed`], which name the pattern or the lock, if the
    /// server did not reply: some locks may have been freed.
    ///
    /// # Cancel safety
    ///
    /// If dropped midway, some locks have been freed.
    pub async fn reset_all_signal_locks(&self) -> Result<u64> {
        let pattern = Signal::records(&self.client.anchor.config.name_prefix);
        let lock_of =
            |key: &str| Signal::of_record(key).map(|lock| Arc::new(lock) as Arc<dyn Kind>);
        self.client.anchor.force_unlock_all(&pattern, lock_of).await
    }
}

/// Configures a [`LockClient`].
///
/// ```no_run
/// # async fn example() -> nestlock::Result<()> {
/// use std::time::Duration;
///
/// let client = nestlock::LockClient::builder()
///     .watchdog_timeout(Duration::from_secs(15))
///     .name_prefix("app:")
///     .connect("redis://127.0.0.1:6379")
///     .await?;
/// # let _ = client; Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct LockClientBuilder {
    config: Config,
    credentials: Option<CredentialSource>,
    #[cfg(feature = "rustls")]
    tls: Option<crate::Tls>,
}

impl LockClientBuilder {
    /// Sets the lease of a lock that is acquired without a fixed lease. The watchdog renews it
    /// every third of this time. If this process dies, its locks are free within this time. Default
    /// 30 s, like Redisson's `lockWatchdogTimeout`; 200 ms to 10 years.
    pub fn watchdog_timeout(mut self, timeout: Duration) -> Self {
        self.config.watchdog_timeout = timeout;
        self
    }

    /// Sets how often a waiter re-checks the lock even if no wake-up message arrives: a lost
    /// message costs this much. Default 1 s, at least 1 ms.
    pub fn poll_cap(mut self, cap: Duration) -> Self {
        self.config.poll_cap = cap;
        self
    }

    /// Sets how long one request may take. Default 3 s, or a third of the watchdog timeout if that
    /// is less; never more than that third.
    pub fn command_timeout(mut self, timeout: Duration) -> Self {
        self.config.command_timeout = Some(timeout);
        self
    }

    /// Sets how long [`LockClientBuilder::connect`] and each reconnect may take, including the
    /// credential provider, the name lookup, TLS and the handshake. The first attempt after a
    /// connection is lost has a third of the watchdog timeout, if that is less, but at least one
    /// second; the credential provider's time does not count in that one. Default 5 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.config.connect_timeout = timeout;
        self
    }

    /// Sets how long an acquire that waits without limit keeps trying while the server is
    /// unreachable, from its own first failed try. Default 10 s. Zero tries once; the first try may
    /// take the command timeout. Of the sleeping waiters of a lock one tries per poll, so the last of
    /// many learns of an outage later.
    pub fn outage_patience(mut self, patience: Duration) -> Self {
        self.config.outage_patience = patience;
        self
    }

    /// Sets how long a silent waiter of this client keeps its place in the queue of a fair lock.
    /// Default 15 s; 200 ms to 10 years.
    ///
    /// A waiter re-checks the lock every second, or every third of this time; it is silent if it is
    /// dead, not polled, or disconnected. For the same time, a free lock stays reserved for a
    /// Redisson waiter that is next in the queue and does not claim it.
    pub fn fair_patience(mut self, patience: Duration) -> Self {
        self.config.fair_patience = patience;
        self
    }

    /// Sets a prefix for every lock name. Default: none.
    pub fn name_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.config.name_prefix = prefix.into();
        self
    }

    /// Sets the longest name, in bytes and including its prefix. Default 1024.
    pub fn max_name_len(mut self, bytes: usize) -> Self {
        self.config.max_name_len = bytes;
        self
    }

    /// Sets how many times one owner may hold one lock. Default `u32::MAX`; at most 99,999 for the
    /// read side of a read-write lock.
    pub fn max_holds(mut self, holds: u32) -> Self {
        self.config.max_holds = holds;
        self
    }

    /// Sets choices for tests and benchmarks. Unstable.
    #[doc(hidden)]
    pub fn tuning(mut self, tuning: Tuning) -> Self {
        self.config.tuning = tuning;
        self
    }

    /// Sets how waiters learn of releases in a cluster. Default [`Messages::Auto`], like Redisson.
    pub fn messages(mut self, messages: Messages) -> Self {
        self.config.messages = messages;
        self
    }

    /// Sets the login for sentinels, if the URL has no `sentinelUsername` and `sentinelPassword`.
    /// For a password without a user, use the user `default`. Default: none, and the servers' login
    /// if a sentinel rejects that.
    pub fn sentinel_login(mut self, user: impl Into<String>, password: impl Into<String>) -> Self {
        self.config.sentinel_login = Some(Login {
            user: Some(user.into()),
            password: Some(password.into()),
        });
        self
    }

    /// Sets a function that returns the user and password, for tokens that expire: AWS IAM, Microsoft
    /// Entra, Google Cloud, Vault. Default: those in the URL.
    ///
    /// The client calls it when it connects. One call serves all connections that wait for it, and
    /// those of the next 5 s. Let it return within a quarter of the
    /// [connect timeout](Self::connect_timeout), 1.25 s by default: a call that takes longer may
    /// hang, so another one is made next to it. If the credentials
    /// [expire](Credentials::valid_for), the client calls it again after three quarters of their
    /// time, for new connections as well, and sends the new ones over the connection that is open.
    /// If the server refuses them, the client calls the function once more before it reports that. A
    /// connection that waits for the elements of a list
    /// ([`signal_lock`](LockClient::signal_lock)) keeps its credentials until the server closes it.
    ///
    /// A held lock is not renewed while the connections are made again. Let a call fit into a third
    /// of the [watchdog timeout](Self::watchdog_timeout).
    ///
    /// Each call runs on a thread of its own, with a tokio runtime of its own, which ends with the
    /// call. So it may block, and it is made although the program's runtime is busy; but
    /// `block_in_place` and a nested `block_on` panic there, as in any current-thread runtime, and a
    /// task that it spawns ends with it. A client whose connections live in such a task (an HTTP
    /// pool, a channel of tonic) belongs into a runtime of the program: spawn the request there,
    /// and await its handle here.
    ///
    /// If the function fails or panics, all connects that wait for that call, and those of the next
    /// 100 ms, fail: [`connect`](Self::connect) returns that, later ones are repeated. A call is
    /// given up after the connect timeout. At most 16 calls of one client are in flight (of fred's
    /// providers: for each server): if none of them returns, no other is made. Sentinels that want
    /// a login get these credentials as well, unless there is a
    /// [`sentinel_login`](Self::sentinel_login).
    ///
    /// [`connect`](Self::connect) fails with [`Error::InvalidConfig`] if the URL has a user or a
    /// password, too.
    ///
    /// ```no_run
    /// # async fn token() -> Result<String, std::io::Error> { Ok(String::new()) }
    /// # async fn example() -> nestlock::Result<()> {
    /// use std::time::Duration;
    ///
    /// use nestlock::{Credentials, LockClient};
    ///
    /// let client = LockClient::builder()
    ///     .credentials(|| async {
    ///         let token = token().await?;
    ///         let hour = Duration::from_secs(3600);
    ///         Ok::<_, std::io::Error>(Credentials::new("app", token).valid_for(hour))
    ///     })
    ///     .connect("rediss://cache.example:6379")
    ///     .await?;
    /// # let _ = client; Ok(())
    /// # }
    /// ```
    pub fn credentials<F, C, E>(mut self, fetch: F) -> Self
    where
        F: Fn() -> C + Send + Sync + 'static,
        C: Future<Output = Result<Credentials, E>> + Send + 'static,
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        self.credentials = Some(store::from_fn(fetch));
        self
    }

    /// Sets the trusted authorities and the client certificate for URLs with TLS (`rediss://`,
    /// `rediss-cluster://`, `rediss-sentinel://`): see [`Tls`](crate::Tls). Default: the system's
    /// authorities, and no client certificate. Certificates never go into URLs.
    ///
    /// [`connect`](Self::connect) fails with [`Error::InvalidConfig`] if a certificate or key
    /// cannot be read, if they do not fit together, or if the URL does not use TLS; with
    /// [`Error::Connect`] if the server rejects the certificate or its own is not trusted.
    #[cfg(feature = "rustls")]
    pub fn tls(mut self, tls: crate::Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Requires acknowledgement by this many replicas: an acquire succeeds only after they have it;
    /// otherwise it is released and fails with [`Error::NotReplicated`].
    ///
    /// `timeout` is how long to wait for them, 1 ms to a third of the [command
    /// timeout](Self::command_timeout); later requests on the same connection wait behind it.
    /// Renewals and extensions, too, move the end of a lease only after such an acknowledgement.
    /// Default: 0 replicas, and 500 ms for
    /// [`AcquireOptions::replicas`](crate::AcquireOptions::replicas).
    ///
    /// Replication is asynchronous. With 0, a lock granted a moment before its server dies may be
    /// lost with it, and another owner gets it. With `n`, it is lost only if the server and the `n`
    /// replicas that had it are gone at once, or if a replica without it is promoted. Received is
    /// not the same as kept: see [`fsync`](Self::fsync). Guard what must not break with [fencing
    /// tokens](crate::guide::fencing).
    ///
    /// If `n` is the number of all replicas, no lock is granted while one of them is away, nor
    /// after a failover until the old master is back as a replica. The servers' own
    /// `min-replicas-to-write` is no substitute, since it checks once a second; use it in addition.
    ///
    /// The cost is the trip to the replicas and back, without another one to the server: `WAIT` is
    /// sent along with the request. Only one `WAIT` is in flight at a time, since it delays all
    /// requests behind it: an acquire first waits for the `WAIT` of other acquires, so the [command
    /// timeout](Self::command_timeout) has to be at least three round trips. If a replica hangs,
    /// all requests of this client take up to `timeout` longer; bounded waits still end in time,
    /// without the lock.
    ///
    /// [`connect`](Self::connect) fails with [`Error::InvalidConfig`] if a server has fewer
    /// replicas than that.
    pub fn replicas(mut self, replicas: u32, timeout: Duration) -> Self {
        (self.config.replicas, self.config.replicas_timeout) = (replicas, Some(timeout));
        self
    }

    /// Requires that an acquire is on disk: in the append-only file of the server and of as many
    /// replicas as [`replicas`](Self::replicas) requires. Uses `WAITAOF`, so it needs Redis 7.2 or
    /// any Valkey. Default: off.
    ///
    /// A server that is killed or loses power still has its locks when it restarts. With
    /// `appendfsync everysec` an acquire takes up to a second, so set the replicas' timeout to more
    /// than that; `always` is the better choice.
    pub fn fsync(mut self, fsync: bool) -> Self {
        self.config.fsync = fsync;
        self
    }

    /// Sets the program's name in the names of its connections,
    /// `nestlock:<application>:<host>:<process>:<client>`, which `CLIENT LIST` and `nestlock who`
    /// show. Default: the name of the executable. Invalid characters become `-`.
    pub fn application(mut self, name: impl Into<String>) -> Self {
        self.config.application = Some(name.into());
        self
    }

    /// Sets which locks are counted together: the label `class` of the metrics. Default: `all`.
    ///
    /// The function gets a lock's name, including the prefix, and is called for each event, so it
    /// must be fast. Do not use names as classes: after 256 pairs of kind and class, all others
    /// become `other`.
    ///
    /// ```no_run
    /// # async fn example() -> nestlock::Result<()> {
    /// let client = nestlock::LockClient::builder()
    ///     .metrics_class(|lock| if lock.starts_with("order:") { "orders" } else { "rest" })
    ///     .connect("redis://127.0.0.1:6379")
    ///     .await?;
    /// # Ok(())
    /// # }
    /// ```
    #[cfg(feature = "metrics")]
    pub fn metrics_class(mut self, class: fn(&str) -> &'static str) -> Self {
        self.config.meter = Meter::of_classes(class);
        self
    }

    /// Connects. See [`LockClient::connect`].
    ///
    /// # Errors
    ///
    /// As [`LockClient::connect`]; [`Error::InvalidConfig`] for contradictory options.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: if dropped midway, the connection is closed.
    pub async fn connect(self, url: impl AsRef<str>) -> Result<LockClient> {
        let endpoint = Endpoint::from_url(url.as_ref())?;
        self.start(endpoint).await
    }

    /// Creates a client that connects on first use. See [`LockClient::connect_lazy`].
    ///
    /// # Errors
    ///
    /// [`Error::InvalidConfig`] for an invalid URL and contradictory options; [`Error::Connect`] if
    /// the system cannot start a thread.
    pub fn connect_lazy(self, url: impl AsRef<str>) -> Result<LockClient> {
        let endpoint = self.complete(Endpoint::from_url(url.as_ref())?)?;
        Ok(LockClient {
            anchor: engine::connect_lazy(endpoint, self.config)?,
        })
    }

    /// Connects with the configuration of another client, in place of a URL:
    /// [`fred::types::config::Config`] (feature `fred`), or [`redis::ConnectionInfo`] (feature
    /// `redis-rs`), into which deadpool-redis's `ConnectionInfo` converts. nestlock makes
    /// connections of its own: see [the guide](crate::guide::configuration). It sets retries,
    /// timeouts and the protocol version itself.
    ///
    /// Of fred's configuration it takes the servers, the login or the credential provider, the
    /// database and TLS. A server's certificate must have the name in the server's own
    /// `tls_server_name`, if that is set. In a cluster, for an IP address, it must have the host
    /// name that the node announces along with the address, or else the one from
    /// `TlsConfig::hostnames`, whose default host is the first configured one. Otherwise it must
    /// have the host.
    ///
    /// Of redis-rs's configuration it takes the address, the login and the database. Its TCP
    /// settings, its version of the protocol and its library name do not apply. redis-rs does
    /// not give out certificates: set them with [`tls`](Self::tls).
    ///
    /// # Errors
    ///
    /// As [`LockClientBuilder::connect`]; [`Error::InvalidConfig`] for what cannot be taken over.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: if dropped midway, the connection is closed.
    #[cfg(any(feature = "fred", feature = "redis-rs"))]
    pub async fn connect_to<E>(self, endpoint: E) -> Result<LockClient>
    where
        E: TryInto<Endpoint>,
        crate::Error: From<E::Error>,
    {
        self.start(endpoint.try_into()?).await
    }

    /// Returns a fred configuration for one of the servers or sentinels of a client's
    /// [`topology`](LockClient::topology), with the login, database and certificates of this URL
    /// and builder: for a connection of your own. Without a node, it points to the first address of
    /// the URL. Sends nothing.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// use nestlock::fred::{clients::Client, interfaces::ClientLike};
    ///
    /// let builder = nestlock::LockClient::builder();
    /// let url = "redis-cluster://127.0.0.1:7000,127.0.0.1:7001";
    /// let client = builder.clone().connect(url).await?;
    /// for node in client.topology().nodes {
    ///     let own = Client::new(builder.fred_config(url, Some(&node))?, None, None, None);
    ///     own.init().await?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidConfig`] for an invalid URL, and for certificates that do not fit together.
    #[cfg(feature = "fred")]
    pub fn fred_config(
        &self,
        url: impl AsRef<str>,
        node: Option<&crate::topology::TopologyNode>,
    ) -> Result<fred::types::config::Config> {
        let endpoint = self.complete(Endpoint::from_url(url.as_ref())?)?;
        endpoint.leads_to(node, self.config.sentinel_login.as_ref())
    }

    async fn start(self, endpoint: Endpoint) -> Result<LockClient> {
        let endpoint = self.complete(endpoint)?;
        let anchor = engine::connect(endpoint, self.config).await?;
        Ok(LockClient { anchor })
    }

    /// Adds what the builder has to the URL: credentials and TLS.
    fn complete(&self, endpoint: Endpoint) -> Result<Endpoint> {
        let endpoint = endpoint.with_credentials(self.credentials.as_ref())?;
        #[cfg(feature = "rustls")]
        let endpoint = endpoint.secured(self.tls.as_ref())?;
        Ok(endpoint)
    }
}
