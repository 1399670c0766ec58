//! The doors: connect, and one method for each lock kind.

use std::{sync::Arc, time::Duration};

#[cfg(doc)]
use crate::error::Error;
#[cfg(feature = "metrics")]
use crate::meter::Meter;
use crate::{
    engine::{self, Anchor, ClientStats, Kind},
    error::Result,
    keys::LockName,
    lock::{
        Fair, Fenced, FencedKey, Lock, MultiLock, NonReentrant, Read, ReadWriteLock, RedLock, RedLockOptions,
        Reentrant, Signal, Spin, StringRecord, Write,
    },
    options::{Backoff, Config, Login, Messages, SignalOptions, Wire},
    owner::OwnerId,
    store::Endpoint,
    token::FencingToken,
    topology::Topology,
};

/// A client of one Redis or Valkey server, or of the master of a service, and the maker of locks on it. Cheap to clone.
///
/// It owns one background thread with two connections, on which leases are renewed, waiters woken and dropped guards
/// released, whatever the caller's runtime is busy with. Locks and guards keep it alive; the last of them to go ends it.
///
/// The drop of that last one never blocks a thread of a runtime: what was dropped, or not settled yet, is released by the client's
/// thread. So that a program which ends next does not take those releases along, the *end of the runtime* waits for them, for
/// half a second at most; outside of a runtime, the drop itself does. Await [`shutdown`](Self::shutdown) to wait for all of them,
/// and to learn what was not released.
///
/// Each client has an identity of its own: two clients never re-enter each other's locks, not even in one process.
#[derive(Debug, Clone)]
pub struct LockClient {
    anchor: Arc<Anchor>,
}

impl LockClient {
    /// Connects with the default configuration.
    ///
    /// The URL reads `redis://[[user]:password@]host[:port][/database]`, `rediss://` for TLS (feature `rustls`),
    /// `redis+unix://[[user]:password@]/path/to/socket`, `redis-cluster://[login@]a,b,c[/database]`,
    /// `redis-sentinel://[login@]a,b,c/service[/database]`, or `redis://a,b` for one service at several addresses: see
    /// [the guide](crate::guide::configuration). It is read whole or refused.
    ///
    /// On a runtime without I/O (`enable_io` was not called) the program's panic hook runs once: tokio answers whether there is any by
    /// a panic, which is caught.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidConfig`] for a URL that cannot be read, and for one that leads to a sentinel as if it were a server;
    /// [`Error::Connect`], with the address, if the server does not answer within the connect timeout (5 s), if it lets
    /// nobody in, and if no master is found: what each of those said who were asked is in there.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropped midway, the connection is closed.
    pub async fn connect(url: impl AsRef<str>) -> Result<Self> {
        Self::builder().connect(url).await
    }

    /// A client that connects when it is first used: the program starts without a server. Makes no request, and needs no runtime.
    ///
    /// The first call that needs a server connects, and fails as [`connect`](Self::connect) does, each with
    /// [`Error::Connect`] until a connection was made: a wait goes on trying for as long as it may take, as in any outage. Ask
    /// [`ready`](Self::ready) to know earlier. From the first connection on it is a client like all others.
    ///
    /// Replies are read by the runtime in which this is called, if there is one, else by the client's own thread. The thread is
    /// started here, which takes less than a millisecond.
    ///
    /// ```no_run
    /// use std::sync::LazyLock;
    ///
    /// use nestlock::LockClient;
    ///
    /// static LOCKS: LazyLock<LockClient> =
    ///     LazyLock::new(|| LockClient::connect_lazy("redis://127.0.0.1:6379").expect("the URL is right"));
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
    /// [`Error::InvalidConfig`] for a URL that cannot be read; [`Error::Connect`] if the system has no thread.
    pub fn connect_lazy(url: impl AsRef<str>) -> Result<Self> {
        Self::builder().connect_lazy(url)
    }

    /// Connects, if that is to be done, and asks every server that locks go to (in a cluster, each master) for an answer: what a
    /// readiness probe wants to know. [`topology`](Self::topology) says which servers those are.
    ///
    /// # Errors
    ///
    /// [`Error::Connect`] if there is no connection, or no answer within the command timeout; [`Error::InvalidConfig`] as for
    /// [`connect`](Self::connect), of a client that is [lazy](Self::connect_lazy).
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: it changes nothing.
    pub async fn ready(&self) -> Result<()> {
        self.anchor.connected(None).await?;
        self.anchor.store.answers().await
    }

    /// A builder with the default configuration.
    pub fn builder() -> LockClientBuilder {
        LockClientBuilder {
            config: Config::default(),
            #[cfg(feature = "rustls")]
            tls: None,
        }
    }

    /// The mutex of this name: each acquire is an owner of its own, as with `tokio::sync::Mutex`. If in doubt, this.
    ///
    /// Whoever has a guard holds the lock, wherever the guard is moved; everybody else waits, including the task that
    /// locked: [`hold_count`](Lock::hold_count) of [`current_owner`](Self::current_owner) is 0 while it holds the lock. To take the lock again inside of functions that take it themselves, use
    /// [`reentrant_lock`](Self::reentrant_lock): the record is the same, so that one name excludes both.
    ///
    /// Nothing is sent. Locks of one name are one lock, however often they are made.
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
    /// [`Error::InvalidName`] for a name that is empty, longer than
    /// [`max_name_len`](LockClientBuilder::max_name_len), one of the keys that locks derive (`redisson_...`,
    /// `nestlock_...`, `lock-signal:...`, `...:rwlock_timeout:...`; the prefix counts), or whose braces would put the lock
    /// and its channel into different slots of a cluster.
    pub fn mutex(&self, name: impl AsRef<str>) -> Result<Lock> {
        Ok(self.reentrant_lock(name)?.owner_per_acquire())
    }

    /// The reentrant lock of this name: Redisson's `RLock`. For nested critical sections, per task.
    ///
    /// The task that holds it may take it again, and has it until all its guards are gone. **A guard that is handed to
    /// another task is still owned by the task that locked:** a task that locks in a loop and moves each guard into
    /// `tokio::spawn` gets them all at once. There use [`mutex`](Self::mutex).
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
        Ok(Lock::new(&self.anchor, Reentrant::new(&self.name(name.as_ref())?)))
    }

    /// The fenced lock of this name: Redisson's `RFencedLock`. Its guards carry a token that only grows.
    ///
    /// [`LockGuard::fencing_token`](crate::LockGuard::fencing_token) is higher than that of every earlier holder, and the
    /// same for all holds of one owner. Hand it to the guarded resource, and let that refuse whatever is lower than what
    /// it has seen. Then a paused holder can do no harm, however late it wakes. For values in Redis,
    /// [`LockClient::fenced_get`] and [`LockClient::fenced_set`] do that; in SQL it is one more condition,
    /// `... AND fence <= ?`.
    ///
    /// The record is the reentrant lock's: one name excludes both. A hold taken as a reentrant lock has no token.
    ///
    /// # The life of the token
    ///
    /// The key `redisson_lock_token:{name}` keeps the last token, one small key for each name, without a TTL: Redisson
    /// would begin at 1 again where it is missing. nestlock begins at the server's time in microseconds, which is above
    /// all tokens given before, after `FLUSHALL` and evictions too; where nobody but nestlock uses a name, its token key
    /// may be deleted at any time.
    ///
    /// Tokens can go back where the server forgets that it counted (a failover that loses writes, an older snapshot),
    /// where its clock goes back while the key is missing, and where somebody else writes or deletes the key.
    ///
    /// # Errors
    ///
    /// As [`LockClient::mutex`]; also for a name that is all in braces, `{x}`, whose token would be that of `x`.
    /// An acquire is refused if the token key is of another type
    /// ([`Error::WrongType`]), or holds no token ([`Error::Store`]).
    pub fn fenced_lock(&self, name: impl AsRef<str>) -> Result<Lock> {
        Ok(Lock::new(&self.anchor, Fenced::new(&self.name(name.as_ref())?.with_keys()?)))
    }

    /// The fair lock of this name: Redisson's `RFairLock`. First come, first served, in the order in which the server saw
    /// the requests of all processes.
    ///
    /// A waiter that is not heard of for the client's [`fair_patience`](LockClientBuilder::fair_patience) loses its place.
    /// One whose future is polled looks often enough to keep it; one that is not polled is not heard of. So wait in a task
    /// of its own where the code around may be busy. A try without a wait takes no place, and gets the lock only if nobody
    /// waits. Do not mix it with other kinds at one name: a reentrant lock would not see the queue. Where an owner holds one,
    /// the other is refused ([`Error::NotReentrant`]).
    ///
    /// # Errors
    ///
    /// As [`LockClient::mutex`]; also for a name that is all in braces, `{x}`, whose queue would be that of `x`.
    pub fn fair_lock(&self, name: impl AsRef<str>) -> Result<Lock> {
        Ok(Lock::new(&self.anchor, self.fair(name.as_ref())?))
    }

    /// The fair lock of this name that its owner cannot take again: Redisson's `NonReentrantFairLock`.
    ///
    /// # Errors
    ///
    /// As [`LockClient::fair_lock`].
    pub fn non_reentrant_fair_lock(&self, name: impl AsRef<str>) -> Result<Lock> {
        Ok(Lock::new(&self.anchor, NonReentrant(self.fair(name.as_ref())?)))
    }

    fn fair(&self, name: &str) -> Result<Fair> {
        Ok(Fair::new(&self.name(name)?.with_keys()?, self.anchor.config.fair_patience, self.anchor.config.grants))
    }

    /// The read-write lock of this name: Redisson's `RReadWriteLock`. Many may read, or one may write.
    ///
    /// A writer that waits holds new readers back, so that it waits only for those that read already. Readers of other
    /// clients of the format (Redisson) do not know of that.
    ///
    /// # Errors
    ///
    /// As [`LockClient::mutex`]; also for a name that is all in braces, `{x}`, whose read holds would be those of
    /// `x`.
    pub fn read_write_lock(&self, name: impl AsRef<str>) -> Result<ReadWriteLock> {
        let name = self.name(name.as_ref())?.with_keys()?;
        let (read, write) = (Read::new(&name), Write::new(&name));
        Ok(ReadWriteLock::new(Lock::new(&self.anchor, read), Lock::new(&self.anchor, write)))
    }

    /// The spin lock of this name, with the default [`Backoff`]: Redisson's `RSpinLock`.
    ///
    /// For many locks that are held for moments: nobody subscribes, and a release tells nobody. Waiters try again after
    /// pauses, so it is not fair, and a wait costs requests. The record is the reentrant lock's: one name excludes
    /// both; a reentrant lock's waiter then learns of a release by looking, within the poll cap.
    ///
    /// # Errors
    ///
    /// As [`LockClient::mutex`].
    pub fn spin_lock(&self, name: impl AsRef<str>) -> Result<Lock> {
        self.spin_lock_with(name, Backoff::default())
    }

    /// The spin lock of this name, with pauses of your choice.
    ///
    /// # Errors
    ///
    /// As [`LockClient::mutex`].
    pub fn spin_lock_with(&self, name: impl AsRef<str>, backoff: Backoff) -> Result<Lock> {
        Ok(Lock::new(&self.anchor, Spin::new(&self.name(name.as_ref())?, backoff)))
    }

    /// The string lock of this name: the record of RedLock libraries, on one server.
    ///
    /// One string, written with `SET NX PX` and deleted by whoever knows its value: redsync, node-redlock, RedLock-Hyperf
    /// and redis-py exclude nestlock, and the other way round. Over several servers use [`red_lock`](Self::red_lock). The
    /// format has no wake-up: waiters try again after pauses; and no count: not reentrant ([`Error::NotReentrant`]).
    ///
    /// The value is the owner ([`LockGuard::owner`](crate::LockGuard::owner)), or what
    /// [`AcquireOptions::value`](crate::AcquireOptions::value) says.
    ///
    /// # Errors
    ///
    /// As [`LockClient::mutex`].
    pub fn string_lock(&self, name: impl AsRef<str>) -> Result<Lock> {
        self.string_lock_with(name, Backoff::default())
    }

    /// The string lock of this name, with pauses of your choice.
    ///
    /// # Errors
    ///
    /// As [`LockClient::mutex`].
    pub fn string_lock_with(&self, name: impl AsRef<str>, backoff: Backoff) -> Result<Lock> {
        Ok(Lock::new(&self.anchor, StringRecord::new(&self.name(name.as_ref())?, backoff)))
    }

    /// The lock of this name that its owner cannot take again: Redisson's `NonReentrantLock`.
    ///
    /// [`Error::NotReentrant`] at once and without a request, where waiting would never end; also where the owner holds
    /// it as a reentrant lock. Record and messages are the reentrant lock's: one name excludes both.
    ///
    /// # Errors
    ///
    /// As [`LockClient::mutex`].
    pub fn non_reentrant_lock(&self, name: impl AsRef<str>) -> Result<Lock> {
        Ok(Lock::new(&self.anchor, NonReentrant(Reentrant::new(&self.name(name.as_ref())?))))
    }

    /// The signal lock of this name: the `Lock` of Python's `python-redis-lock`, key for key, so that Python and Rust
    /// exclude and wake each other.
    ///
    /// The record is the string `lock:{name}`, whose value is the owner; each release wakes one waiter, of whatever
    /// process, through the list `lock-signal:{name}`. Its owner cannot take it again ([`Error::NotReentrant`]).
    /// Leases are whole seconds on the server: a part of a second counts as one there, never here. To release or extend
    /// what a Python process holds, take its owner from [`Lock::holder`].
    ///
    /// The first wait makes a connection, on which BLPOP waits for all lists of this client. In a cluster waiters look again
    /// after pauses instead, of 10 ms up to the poll cap.
    ///
    /// # Errors
    ///
    /// As [`LockClient::mutex`]; [`Error::InvalidName`] also in a cluster, for a name without a `{tag}`: its two keys are in
    /// different slots.
    pub fn signal_lock(&self, name: impl AsRef<str>) -> Result<Lock> {
        self.signal_lock_with(name, SignalOptions::default())
    }

    /// The signal lock of this name, with options: records without expiry, signals that live longer.
    ///
    /// # Errors
    ///
    /// As [`LockClient::signal_lock`].
    pub fn signal_lock_with(&self, name: impl AsRef<str>, options: SignalOptions) -> Result<Lock> {
        let name = self.name(name.as_ref())?;
        let name = if self.anchor.store.is_cluster() { name.with_tag()? } else { name };
        Ok(Lock::new(&self.anchor, Signal::new(&name, options)))
    }

    /// Several locks as one, all or nothing: Redisson's `RedissonMultiLock`. They may be of any kind and of any client.
    ///
    /// Nobody waits for one member while holding another, so that processes which name the same locks in different
    /// orders do not block each other. Each member is acquired with the lease that was asked for. Members that several
    /// independent servers hold are no quorum: one that cannot be reached fails the whole.
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
        Ok(Lock::of_several(MultiLock::new(&self.anchor, members.into_iter().collect())?))
    }

    /// The RedLock of this name over independent servers, one client for each: held while most of the servers record it, so
    /// that some may fail. The record of redsync, node-redlock and RedLock-Hyperf, which exclude it, and the other way round.
    ///
    /// Servers are asked at once, and waited for no longer than a part of the TTL; a minority that is dead or hangs costs
    /// nothing beyond that. Each member renews its own record; the lock is lost when most members are. An acquire without a
    /// limit to its wait ends after [`RedLockOptions::tries`] rounds in a row that failed.
    ///
    /// # What it cannot promise
    ///
    /// It is no stronger than its clocks: a server whose clock jumps, or that forgets a record (restarted without
    /// persistence, sooner than the TTL), can let a second holder in. Let such a server stay down for a TTL. Against a
    /// paused holder nothing here helps. Only a fencing token does, and independent servers cannot count one.
    ///
    /// ```no_run
    /// # async fn example(a: nestlock::LockClient, b: nestlock::LockClient, c: nestlock::LockClient) -> nestlock::Result<()> {
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
    /// [`Error::InvalidName`], [`Error::InvalidLease`]; [`Error::InvalidConfig`] without a server, for options that make no
    /// sense, and where two clients are of one server, which would count twice: by what it says in `INFO`, as each of them
    /// connected. A server that may not be asked, or was restarted between the two, is not found out.
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
        Ok(Lock::of_several(RedLock::new(anchor, name, (locks, labels), options, true)?))
    }

    /// A RedLock over any locks: reentrant or fair ones of independent servers, say. All are acquired as the same task. An
    /// owner that an acquire names belongs to one client, and the others refuse it.
    ///
    /// This client lends its clock.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidConfig`] without a member, for options that make no sense, and where two members are the lock of one
    /// name on one server, as [`red_lock`](Self::red_lock) finds out; [`Error::InvalidLease`].
    pub fn red_lock_over(&self, members: impl IntoIterator<Item = Lock>, options: RedLockOptions) -> Result<Lock> {
        let locks: Vec<_> = members.into_iter().collect();
        let labels: Vec<Arc<str>> = locks.iter().map(|lock| lock.name().into()).collect();
        let name = labels.join("+").into();
        Ok(Lock::of_several(RedLock::new(Some(&self.anchor), name, (locks, labels), options, false)?))
    }

    /// Writes a value, unless `key` has seen a higher fencing token than `token`.
    ///
    /// The check and the write are one step on the server. The highest token seen is kept beside the value, in
    /// `nestlock_fence:{key}`, without a TTL. The value is a plain string at `key`, as it is: the client's
    /// [`name_prefix`](LockClientBuilder::name_prefix) is for locks only. As with `SET`, a TTL that it had is gone.
    ///
    /// # What it promises
    ///
    /// Tokens that were let in at one key never go back, whatever clocks, pauses and leases do: once the holder of a
    /// higher token has used [`LockClient::fenced_get`] or this, the lower one changes nothing any more. It does not
    /// need the lock to be held still.
    ///
    /// - Until then the lower one may write. If you compute the new value from the old one, read it with
    ///   [`LockClient::fenced_get`], which shuts the door before it reads.
    /// - Every writer must come this way. A plain `SET` is not stopped.
    /// - It is a matter of one key. Where the key `nestlock_fence:{key}` is lost (`FLUSHALL`, an eviction, a failover
    ///   that loses writes), whoever comes first is let in; leave it where the value is deleted.
    /// - Use the tokens of one lock for one key.
    /// - No lock may be kept at the key. A string with a TTL that was never guarded may be a lock's record and is refused;
    ///   one without is taken over.
    ///
    /// # Errors
    ///
    /// [`Error::StaleToken`]: another owner has held the lock since; nothing was changed. [`Error::InvalidName`] as for a
    /// lock's name, and for `lock:...` and `{...}`; [`Error::WrongType`] if the key is not a string. [`Error::Store`]: surely
    /// not written. [`Error::Unconfirmed`]: perhaps written, perhaps later; try the same value with the same token again, or
    /// give the lock up. Nothing is repeated by itself.
    ///
    /// # Cancel safety
    ///
    /// Dropped before it is polled, nothing happens. Dropped midway, the value may or may not be written, before or
    /// after what the same holder writes next if the connection broke in between; never after a higher token came.
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
    pub async fn fenced_set(&self, key: impl AsRef<str>, value: impl AsRef<[u8]>, token: FencingToken) -> Result<()> {
        let call = self.fenced_key(key.as_ref())?.set(value.as_ref(), token);
        self.anchor.guarded(token, &call).await.map(drop)
    }

    /// Reads the value at `key`, and lets nobody with a lower fencing token than `token` in from then on. `None`: there
    /// is none.
    ///
    /// For a holder that computes the next value from this one: a write of an earlier holder comes before this read, or
    /// never. See [`LockClient::fenced_set`], which also says what is promised and what not.
    ///
    /// # Errors
    ///
    /// As [`LockClient::fenced_set`].
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropped midway, lower tokens may or may not be turned away.
    pub async fn fenced_get(&self, key: impl AsRef<str>, token: FencingToken) -> Result<Option<Vec<u8>>> {
        let call = self.fenced_key(key.as_ref())?.get(token);
        self.anchor.guarded(token, &call).await
    }

    fn fenced_key(&self, key: &str) -> Result<FencedKey> {
        // not a lock's name: no prefix
        Ok(FencedKey::new(&LockName::guarded(key, self.anchor.config.max_name_len)?))
    }

    fn name(&self, name: &str) -> Result<LockName> {
        let config = &self.anchor.config;
        LockName::new(&config.name_prefix, name, config.max_name_len)
    }

    /// An owner of this client by name, for [`AcquireOptions::owner`](crate::AcquireOptions::owner): tasks that use the
    /// same owner share its holds. 1 to 128 visible ASCII characters, without `.`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidOwner`].
    pub fn owner(&self, name: impl AsRef<str>) -> Result<OwnerId> {
        OwnerId::named(&self.anchor.client, name.as_ref())
    }

    /// Who the caller is, as owner of locks: the scope, else the tokio task, else the thread. See [`OwnerId`].
    #[must_use]
    pub fn current_owner(&self) -> OwnerId {
        OwnerId::current(&self.anchor.client)
    }

    /// Where the server is, as the URL says: host and port, several of them, the sentinels and the service, or the socket's
    /// path. Never the password.
    #[must_use]
    pub fn address(&self) -> &str {
        self.anchor.store.address()
    }

    /// Waits until everything that nobody awaits is settled: dropped guards, cancelled calls, lost replies.
    ///
    /// What the server refuses (no replicas, no permission) is tried again until the record has ended. This waits that long,
    /// and for ever where a lock has no expiry.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn idle(&self) {
        self.anchor.idle().await;
    }

    /// Turns waiters away, releases every lock that this client holds, and closes the connections.
    ///
    /// Guards that are still alive report [`LossReason::ShutDown`](crate::LossReason::ShutDown). Takes two command
    /// timeouts and a tenth of a second at most.
    ///
    /// # Errors
    ///
    /// [`Error::Unsettled`] if the server did not confirm every release; those locks end with their leases. Releases that it
    /// refuses for good (no permission, a command that it lacks) are not waited for.
    ///
    /// # Cancel safety
    ///
    /// Once polled, the locks are given up; dropped midway, the connections stay open until the client is dropped.
    pub async fn shutdown(&self) -> Result<()> {
        self.anchor.shutdown().await
    }

    /// What an operator may do to locks that others hold. Nothing is sent.
    #[must_use]
    pub fn maintenance(&self) -> Maintenance<'_> {
        Maintenance { client: self }
    }

    /// Which servers this client uses by now, as it knows: without a request. For people and logs.
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

    /// What this client keeps in memory for its locks. For tests and metrics.
    #[must_use]
    pub fn stats(&self) -> ClientStats {
        self.anchor.stats()
    }
}

/// What an operator does to locks that others hold: see [`LockClient::maintenance`].
#[derive(Debug)]
pub struct Maintenance<'a> {
    client: &'a LockClient,
}

impl Maintenance<'_> {
    /// Frees every signal lock whose name begins with this client's prefix, whoever holds it, and wakes a waiter of each;
    /// returns how many were held. python-redis-lock's `reset_all`, by `SCAN` instead of `KEYS`.
    ///
    /// For the start of a service that knows that nobody is at work: locks that are taken meanwhile may or may not be freed.
    /// Every string at a key `lock:...` counts as a signal lock; names that are not UTF-8 are left alone.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] and [`Error::Unconfirmed`], which name the pattern or the lock, if the server did not answer:
    /// some locks may have been freed.
    ///
    /// # Cancel safety
    ///
    /// Dropped midway, some locks have been freed.
    pub async fn reset_all_signal_locks(&self) -> Result<u64> {
        let pattern = Signal::records(&self.client.anchor.config.name_prefix);
        let lock_of = |key: &str| Signal::of_record(key).map(|lock| Arc::new(lock) as Arc<dyn Kind>);
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
    #[cfg(feature = "rustls")]
    tls: Option<crate::Tls>,
}

impl LockClientBuilder {
    /// The lease of a lock that was acquired without one; it is renewed every third of it. Default 30 s, as Redisson's
    /// `lockWatchdogTimeout`; 200 ms to 10 years. When this process dies, its locks are free within this time.
    pub fn watchdog_timeout(mut self, timeout: Duration) -> Self {
        self.config.watchdog_timeout = timeout;
        self
    }

    /// How long the waiters of a lock rely on pub/sub before one of them looks for itself. Default 1 s, at least 1 ms.
    /// A message that is lost costs this much.
    pub fn poll_cap(mut self, cap: Duration) -> Self {
        self.config.poll_cap = cap;
        self
    }

    /// How long one request may take. Default 3 s, or a third of the watchdog timeout if that is less; never more than
    /// that third.
    pub fn command_timeout(mut self, timeout: Duration) -> Self {
        self.config.command_timeout = Some(timeout);
        self
    }

    /// How long [`LockClientBuilder::connect`] may take, and any attempt to connect again: what a credential provider takes, the
    /// look-up of the name, TLS and the handshake together. The first attempt after a connection was lost has a third of the
    /// watchdog timeout, if that is less, but no less than a second. Default 5 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.config.connect_timeout = timeout;
        self
    }

    /// How long an acquire without a limit to its wait goes on while the server cannot be reached. Default 10 s. Zero
    /// tries once.
    pub fn outage_patience(mut self, patience: Duration) -> Self {
        self.config.outage_patience = patience;
        self
    }

    /// After how long a silent waiter of this client at a fair lock loses its place. Default 15 s; 200 ms to 10 years. A
    /// waiter looks every second, or every third of this: it is silent when it is dead, not polled, or cut off for so long.
    /// For the same time the free lock is kept for a waiter of Redisson's whose turn it is and which does not come.
    pub fn fair_patience(mut self, patience: Duration) -> Self {
        self.config.fair_patience = patience;
        self
    }

    /// What is put before every lock name. Default nothing.
    pub fn name_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.config.name_prefix = prefix.into();
        self
    }

    /// The longest name, with its prefix, in bytes. Default 1024.
    pub fn max_name_len(mut self, bytes: usize) -> Self {
        self.config.max_name_len = bytes;
        self
    }

    /// How often one owner may hold one lock. Default `u32::MAX`; the read side of a read-write lock never more than
    /// 99,999.
    pub fn max_holds(mut self, holds: u32) -> Self {
        self.config.max_holds = holds;
        self
    }

    /// Whether a lock that several tasks of this client wait for goes from one to the next without the server being asked.
    /// Default `true`.
    ///
    /// For plain and non-reentrant locks that are held without a lease. It may, for at most 2 ms after the server's last
    /// answer about the lock and 64 times in a row; then it is released, and others have their turn. Within that time
    /// [`unlock`](crate::LockGuard::unlock) answers `Ok` by what the server said up to 2 ms ago: that somebody forced the
    /// lock free since is found out by the one who releases it there. `false`: each release asks the server, which takes a
    /// round trip.
    pub fn relay(mut self, relay: bool) -> Self {
        self.config.relay = relay;
        self
    }

    /// Whether the release of a fair lock makes the next waiter the holder, and tells it so. Default `true`.
    ///
    /// That is for waiters of nestlock's, of whatever client, that asked for no lease and no replicas, and whose watchdog timeout
    /// is not less than their [`fair_patience`](Self::fair_patience). Such a waiter has the lock half a round trip after the
    /// release, and has not asked for it. The record lives for what is left of its patience at first, and the watchdog renews it
    /// in time; where twice the command timeout is more than that, the waiter asks. `false`: the releases of this client tell the
    /// next waiter that the lock is free, and its waiters ask for it.
    pub fn grants(mut self, grants: bool) -> Self {
        self.config.grants = grants;
        self
    }

    /// Whether acquires and releases of plain locks that are about to be sent at the same moment go as one script, 32 at most.
    /// Default `true`.
    ///
    /// Two thirds of what a script costs a server is that it is one. Each is answered for itself, as if it had been sent for
    /// itself. `false`: for whoever counts or reads the server's commands. Nothing goes together in a cluster, where
    /// copies are waited for ([`replicas`](Self::replicas)), and over fred's client.
    pub fn bundle(mut self, bundle: bool) -> Self {
        self.config.bundle = bundle;
        self
    }

    /// Whether it is tried at connect that the server runs scripts. Default `true`. `false` is for programs that only look, whose
    /// user may not run any. Unstable.
    #[doc(hidden)]
    pub fn tries_scripts(mut self, tries: bool) -> Self {
        self.config.tries_scripts = tries;
        self
    }

    /// Which client carries requests and messages. Default [`Wire::Own`].
    pub fn wire(mut self, wire: Wire) -> Self {
        self.config.wire = wire;
        self
    }

    /// How waiters hear of releases in a cluster. Default [`Messages::Auto`], as Redisson does.
    pub fn messages(mut self, messages: Messages) -> Self {
        self.config.messages = messages;
        self
    }

    /// How to log in at sentinels, where `sentinelUsername` and `sentinelPassword` in the URL do not say it. For a password
    /// without a user, the user is `default`. Default: as at the servers, and where that is refused, without a login.
    pub fn sentinel_login(mut self, user: impl Into<String>, password: impl Into<String>) -> Self {
        self.config.sentinel_login = Some(Login { user: Some(user.into()), password: Some(password.into()) });
        self
    }

    /// Whom to believe and what to show where the URL asks for TLS (`rediss://`, `rediss-cluster://`, `rediss-sentinel://`): see
    /// [`Tls`](crate::Tls). Default: the system's authorities, and no certificate to show. Certificates never travel in URLs.
    ///
    /// [`connect`](Self::connect) answers [`Error::InvalidConfig`] for what cannot be read, for a key that does not fit, and for a
    /// URL that asks for no TLS; [`Error::Connect`] for a server that refuses the certificate, or has one that is not believed.
    #[cfg(feature = "rustls")]
    pub fn tls(mut self, tls: crate::Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// An acquire counts when so many replicas have it, besides the server; else it is given back, and
    /// [`Error::NotReplicated`]. `timeout`: for so long they are waited for, 1 ms to a third of the
    /// [command timeout](Self::command_timeout); whatever is asked over the same connection meanwhile stands behind that. Also
    /// a renewal or an extension moves the end of a lease only then. Default: 0, and 500 ms for
    /// [`AcquireOptions::replicas`](crate::AcquireOptions::replicas).
    ///
    /// Replication is asynchronous. With 0, a lock that was given a moment before its server died may be lost with it, and
    /// somebody else gets it. With this it is lost only if the server and as many replicas that had it are gone at once, or the
    /// servers promote one that had not. Received is not kept: see [`fsync`](Self::fsync). Guard what must not break
    /// with [fencing tokens](crate::guide::fencing).
    ///
    /// With as many as there are, no lock is granted while one of them is away, nor after a failover until the old master
    /// is back as a replica. The servers' own `min-replicas-to-write` is no substitute, since it looks once a second; it
    /// is good to have besides.
    ///
    /// Costs the way to the replicas and back, and no round trip more: `WAIT` goes along. But one is under way at a time, since it
    /// holds up what is asked behind it: an acquire beside others waits for theirs first, so a far server's
    /// [command timeout](Self::command_timeout) has to be three round trips at least. Where a replica hangs, all requests of
    /// this client take up to `timeout` longer; bounded waits end in time nevertheless, without the lock.
    ///
    /// [`connect`](Self::connect) fails with [`Error::InvalidConfig`] where a server has fewer replicas than that.
    pub fn replicas(mut self, replicas: u32, timeout: Duration) -> Self {
        (self.config.replicas, self.config.replicas_timeout) = (replicas, Some(timeout));
        self
    }

    /// An acquire counts when it is in the append-only file of the server, and in those of as many replicas as
    /// [`replicas`](Self::replicas) says, written to disk: by `WAITAOF`, for Redis from 7.2 and Valkey. Default: no.
    ///
    /// A server that is killed or loses its power has its locks again when it is back. With `appendfsync everysec` an acquire
    /// takes up to a second, so set the timeout to more than that; `always` is what this wants.
    pub fn fsync(mut self, fsync: bool) -> Self {
        self.config.fsync = fsync;
        self
    }

    /// What this program is called in the names of its connections, `nestlock:<application>:<host>:<process>:<client>`, which
    /// the server's CLIENT LIST and `nestlock who` show. Default: the name of its executable. Characters that have no place there
    /// become `-`.
    pub fn application(mut self, name: impl Into<String>) -> Self {
        self.config.application = Some(name.into());
        self
    }

    /// Which locks are counted together: the label `class` of what is measured. The function is given a lock's name, with the
    /// prefix, and is called with each event, so that it must be quick. A name itself is no class: after 256 pairs of
    /// kind and class, all others are `other`. Default: `all`.
    ///
    /// ```no_run
    /// # async fn example() -> nestlock::Result<()> {
    /// let client = nestlock::LockClient::builder()
    ///     .metrics_class(|lock| if lock.starts_with("order:") { "orders" } else { "rest" })
    ///     .connect("redis://127.0.0.1:6379")
    ///     .await?;
    /// # let _ = client; Ok(())
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
    /// As [`LockClient::connect`]; [`Error::InvalidConfig`] for a configuration that makes no sense.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropped midway, the connection is closed.
    pub async fn connect(self, url: impl AsRef<str>) -> Result<LockClient> {
        let endpoint = Endpoint::from_url(url.as_ref())?;
        self.start(endpoint).await
    }

    /// Makes a client that connects when it is first used. See [`LockClient::connect_lazy`].
    ///
    /// # Errors
    ///
    /// [`Error::InvalidConfig`] for a URL that cannot be read and a configuration that makes no sense; [`Error::Connect`] if the
    /// system has no thread.
    pub fn connect_lazy(self, url: impl AsRef<str>) -> Result<LockClient> {
        let endpoint = self.secured(Endpoint::from_url(url.as_ref())?)?;
        Ok(LockClient { anchor: engine::connect_lazy(endpoint, self.config)? })
    }

    /// Connects to where a configuration of fred's leads ([`fred::types::config::Config`], feature `fred-config`): for TLS
    /// with a custom CA, credential providers and the like. Retries, timeouts and the protocol version are set by nestlock.
    ///
    /// # Errors
    ///
    /// As [`LockClientBuilder::connect`].
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropped midway, the connection is closed.
    #[cfg(feature = "fred-config")]
    pub async fn connect_to(self, endpoint: impl Into<Endpoint>) -> Result<LockClient> {
        self.start(endpoint.into()).await
    }

    /// A configuration of fred's that leads to one of the servers or sentinels of a client's
    /// [`topology`](LockClient::topology), with the login, the database and the certificates that this URL and this builder say;
    /// for a connection of one's own, over which other questions are asked. Without a node: to the first address of the URL.
    /// Nothing is sent.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// use nestlock::fred::{clients::Client, interfaces::ClientLike};
    ///
    /// let (builder, url) = (nestlock::LockClient::builder(), "redis-cluster://127.0.0.1:7000,127.0.0.1:7001");
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
    /// [`Error::InvalidConfig`] for a URL that cannot be read, and for certificates that do not fit.
    #[cfg(feature = "fred-config")]
    pub fn fred_config(
        &self,
        url: impl AsRef<str>,
        node: Option<&crate::topology::TopologyNode>,
    ) -> Result<crate::store::FredConfig> {
        let endpoint = self.secured(Endpoint::from_url(url.as_ref())?)?;
        endpoint.leads_to(node, self.config.sentinel_login.as_ref())
    }

    async fn start(self, endpoint: Endpoint) -> Result<LockClient> {
        let endpoint = self.secured(endpoint)?;
        let anchor = engine::connect(endpoint, self.config).await?;
        Ok(LockClient { anchor })
    }

    #[cfg_attr(
        not(feature = "rustls"),
        expect(clippy::unnecessary_wraps, clippy::unused_self, reason = "with TLS it is")
    )]
    fn secured(&self, endpoint: Endpoint) -> Result<Endpoint> {
        #[cfg(feature = "rustls")]
        let endpoint = endpoint.secured(self.tls.as_ref())?;
        Ok(endpoint)
    }
}
