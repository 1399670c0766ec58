//! An OAuth login whose refresh token works once: three replicas need its access token, and only
//! one of them refreshes it.
//!
//! Run: `cargo run --example refresh_token`  (uses `NESTLOCK_URL`, or an embedded server)
#![allow(clippy::print_stdout)]

mod support;

use std::{
    process,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use nestlock::{
    FencingToken, LockClient,
    fred::prelude::{Builder, Client, ClientLike, Config, KeysInterface, ReconnectPolicy},
};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// How long an access token is valid. Minutes, at a real provider.
const VALID_FOR: Duration = Duration::from_millis(200);
/// An access token is replaced when it has less left than this.
const MARGIN: Duration = Duration::from_millis(50);

/// What a login consists of. Kept in Redis, in the clear for this example: encrypt yours.
#[derive(Debug, Clone)]
struct Tokens {
    access: String,
    refresh: String,
    expires_at: Duration,
}

impl Tokens {
    fn is_fresh(&self) -> bool {
        now() + MARGIN < self.expires_at
    }

    fn to_text(&self) -> String {
        let expires_at = self.expires_at.as_millis();
        format!("{} {} {expires_at}", self.access, self.refresh)
    }

    fn from_text(text: &str) -> Outcome<Self> {
        let mut words = text.split(' ');
        let mut next = || words.next().ok_or("the stored login is cut short");
        Ok(Self {
            access: next()?.to_owned(),
            refresh: next()?.to_owned(),
            expires_at: Duration::from_millis(next()?.parse()?),
        })
    }
}

fn now() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

/// Stands for the provider. A refresh token that comes a second time means a thief to it: it ends
/// the login, as RFC 9700 advises.
#[derive(Default)]
struct Provider {
    /// How many times the login was refreshed, and whether it was ended.
    login: Mutex<(u32, bool)>,
}

impl Provider {
    fn tokens(number: u32) -> Tokens {
        Tokens {
            access: format!("access-{number}"),
            refresh: format!("refresh-{number}"),
            expires_at: now() + VALID_FOR,
        }
    }

    async fn refresh(&self, token: &str) -> Outcome<Tokens> {
        sleep(Duration::from_millis(20)).await;
        let mut login = self.login.lock().expect("no request panics");
        let (number, ended) = &mut *login;
        *ended |= token != format!("refresh-{number}");
        if *ended {
            return Err("invalid_grant: please log in again".into());
        }
        *number += 1;
        Ok(Self::tokens(*number))
    }

    fn refreshes(&self) -> Outcome<u32> {
        match *self.login.lock().expect("no request panics") {
            (_, true) => Err("a refresh token was used twice".into()),
            (number, false) => Ok(number),
        }
    }
}

struct Replica {
    client: LockClient,
    redis: Client,
    provider: Arc<Provider>,
    key: String,
}

impl Replica {
    /// Returns an access token that is valid for a while.
    async fn access_token(self: &Arc<Self>) -> Outcome<String> {
        let text: Option<String> = self.redis.get(&self.key).await?;
        let tokens = Tokens::from_text(&text.ok_or("log in first")?)?;
        if tokens.is_fresh() {
            return Ok(tokens.access);
        }
        // a separate task: if the caller goes away when the provider has just replied, the only
        // copy of the next refresh token would go with it
        tokio::spawn(Arc::clone(self).refresh()).await?
    }

    async fn refresh(self: Arc<Self>) -> Outcome<String> {
        let lock = self.client.fenced_lock(format!("login:{}", self.key))?;
        let guard = lock.lock().await?;
        let token = guard.fencing_token().ok_or("a fenced lock has tokens")?;
        // read again: another replica has usually refreshed it in the meantime
        let text = self.client.fenced_get(&self.key, token).await?;
        let tokens = Tokens::from_text(&String::from_utf8(text.ok_or("log in first")?)?)?;
        if tokens.is_fresh() {
            guard.unlock().await?;
            return Ok(tokens.access);
        }
        // the last moment to stop: from here on, the old refresh token may be used up
        if guard.is_lost() {
            return Err("the lock was lost; try again".into());
        }
        let asked = timeout(
            Duration::from_secs(10),
            self.provider.refresh(&tokens.refresh),
        );
        let fresh = asked.await??;
        self.store(&fresh, token).await?;
        // the tokens are stored, so an error of the release concerns no caller
        drop(guard);
        Ok(fresh.access)
    }

    /// Stores the login, unless a later holder of the lock has read it. Retries while the server is
    /// away, under the same lock.
    async fn store(&self, tokens: &Tokens, token: FencingToken) -> Outcome<()> {
        let (give_up, text) = (Instant::now() + Duration::from_secs(60), tokens.to_text());
        loop {
            match self.client.fenced_set(&self.key, &text, token).await {
                Err(error) if error.is_transient() && Instant::now() < give_up => {
                    sleep(Duration::from_millis(100)).await;
                }
                stored => return Ok(stored?),
            }
        }
    }
}

#[tokio::main]
async fn main() -> Outcome<()> {
    let server = support::server().map_err(|error| error.to_string())?;
    let redis = Builder::from_config(Config::from_url(server.url())?)
        .set_policy(ReconnectPolicy::new_constant(0, 100))
        .with_performance_config(|config| config.default_command_timeout = Duration::from_secs(3))
        .build()?;
    redis.init().await?;
    let key = format!("nestlock-example:{}:login", process::id());

    // without a lock: two replicas find the token too old at the same time
    let provider = Provider::default();
    let old = Provider::tokens(0).refresh;
    let (one, other) = tokio::join!(provider.refresh(&old), provider.refresh(&old));
    let refused = one.and(other).expect_err("each token works once");
    println!("without a lock: {refused}");
    assert!(provider.refreshes().is_err());

    // three clients stand for three replicas, each with 20 requests at a time
    let provider = Arc::new(Provider::default());
    redis
        .set::<(), _, _>(&key, Provider::tokens(0).to_text(), None, None, false)
        .await?;
    let (mut requests, end) = (JoinSet::new(), Instant::now() + Duration::from_secs(1));
    for _ in 0..3 {
        let replica = Arc::new(Replica {
            client: LockClient::connect(server.url()).await?,
            redis: redis.clone(),
            provider: Arc::clone(&provider),
            key: key.clone(),
        });
        for _ in 0..20 {
            let replica = Arc::clone(&replica);
            requests.spawn(async move {
                let mut handled = 0;
                while Instant::now() < end {
                    replica.access_token().await?;
                    handled += 1;
                    sleep(Duration::from_millis(5)).await;
                }
                Outcome::Ok(handled)
            });
        }
    }
    let mut handled = 0;
    while let Some(request) = requests.join_next().await {
        handled += request??;
    }
    let refreshes = provider.refreshes()?;
    println!("with a lock: {handled} requests, {refreshes} refreshes, no refresh token used twice");
    // a token is replaced when it has less left than the margin, not sooner
    assert!((1..=8).contains(&refreshes));

    for used in [
        &key,
        &format!("nestlock_fence:{{{key}}}"),
        &format!("redisson_lock_token:{{login:{key}}}"),
    ] {
        redis.del::<(), _>(used).await?;
    }
    redis.quit().await?;
    Ok(())
}
