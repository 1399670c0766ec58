//! A Redisson client of a fair lock without a JVM: the effect of its scripts on the keys, row by
//! row of the tables in `lua/README.md`'s source of facts, in our own code. The caller passes the
//! times, as with Redisson.

use super::wire::{Reply, Wire};

/// Removes heads of the queue whose time has passed. The scores of the others stay.
const PUT_OUT: &str = "
local record, queue, scores = KEYS[1], KEYS[2], KEYS[3]
local field, now, wait, lease, channel = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], ARGV[5]
while true do
    local first = redis.call('lindex', queue, 0)
    local time = first and redis.call('zscore', scores, first)
    if not time or tonumber(time) > now then break end
    redis.call('zrem', scores, first)
    redis.call('lpop', queue)
end
";
/// Acquires if the lock is free and this waiter is next: its wait is subtracted from all scores.
const SERVE: &str = "
local first = redis.call('lindex', queue, 0)
if redis.call('exists', record) == 0 and (not first or first == field) then
    redis.call('lpop', queue)
    redis.call('zrem', scores, field)
    for _, waiter in ipairs(redis.call('zrange', scores, 0, -1)) do redis.call('zincrby', scores, -wait, waiter) end
    redis.call('hset', record, field, 1)
    redis.call('pexpire', record, lease)
    return false
end
if redis.call('hexists', record, field) == 1 then
    redis.call('hincrby', record, field, 1)
    redis.call('pexpire', record, lease)
    return false
end
";
/// Joins the queue behind the last waiter, whose score is the base of the new one.
const JOIN: &str = "
local left = redis.call('pttl', record)
if redis.call('zscore', scores, field) then return math.max(0, left) end
local last = redis.call('lindex', queue, -1)
local time = last and last ~= field and redis.call('zscore', scores, last)
if time then left = tonumber(time) - now end
if redis.call('zadd', scores, left + wait + now, field) == 1 then redis.call('rpush', queue, field) end
return left
";
const UNLOCK: &str = "
local first = redis.call('lindex', queue, 0)
local function tell()
    if first then redis.call('publish', channel .. ':' .. first, '0') end
    return 1
end
if redis.call('exists', record) == 0 then return tell() end
if redis.call('hexists', record, field) == 0 then return false end
if redis.call('hincrby', record, field, -1) > 0 then return 0 end
redis.call('del', record)
return tell()
";
/// Gives up: its wait is subtracted from the scores of those behind it.
const LEAVE: &str = "
local record, queue, scores = KEYS[1], KEYS[2], KEYS[3]
local field, wait, behind = ARGV[1], tonumber(ARGV[3]), false
for _, waiter in ipairs(redis.call('lrange', queue, 0, -1)) do
    if behind then redis.call('zincrby', scores, -wait, waiter) end
    behind = behind or waiter == field
end
redis.call('zrem', scores, field)
redis.call('lrem', queue, 0, field)
";

/// The keys and the channel of a fair lock whose name has no braces, as Redisson names them.
#[derive(Debug)]
pub struct RFairLock {
    pub name: String,
    pub queue: String,
    pub timeouts: String,
    pub channel: String,
}

impl RFairLock {
    pub fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            queue: format!("redisson_lock_queue:{{{name}}}"),
            timeouts: format!("redisson_lock_timeout:{{{name}}}"),
            channel: format!("redisson_lock__channel:{{{name}}}"),
        }
    }

    fn run(
        &self,
        wire: &mut Wire,
        script: &[&str],
        field: &str,
        now: i64,
        wait: i64,
        lease: i64,
    ) -> Reply {
        let (script, [now, wait, lease]) = (
            script.concat(),
            [now, wait, lease].map(|number| number.to_string()),
        );
        let keys = [
            "EVAL",
            &script,
            "3",
            &self.name,
            &self.queue,
            &self.timeouts,
        ];
        let reply = wire
            .call(&[&keys[..], &[field, &now, &wait, &lease, &self.channel]].concat())
            .unwrap();
        assert!(!reply.is_error(), "{reply:?}");
        reply
    }

    /// Acquires or joins the queue: `None` if it has the lock, else how long it sleeps without a
    /// message.
    pub fn wait(
        &self,
        wire: &mut Wire,
        field: &str,
        now: i64,
        wait: i64,
        lease: i64,
    ) -> Option<i64> {
        match self.run(wire, &[PUT_OUT, SERVE, JOIN], field, now, wait, lease) {
            Reply::Nil => None,
            busy => Some(busy.int()),
        }
    }

    /// Runs `tryLock()`.
    pub fn try_lock(&self, wire: &mut Wire, field: &str, now: i64, wait: i64, lease: i64) -> bool {
        self.run(wire, &[PUT_OUT, SERVE, "return 1"], field, now, wait, lease) == Reply::Nil
    }

    pub fn unlock(&self, wire: &mut Wire, field: &str, now: i64, lease: i64) {
        assert_eq!(
            self.run(wire, &[PUT_OUT, UNLOCK], field, now, 0, lease),
            Reply::Int(1),
            "{field} held it"
        );
    }

    /// Ends a `tryLock(wait)` at its timeout.
    pub fn give_up(&self, wire: &mut Wire, field: &str, wait: i64) {
        self.run(wire, &[LEAVE], field, 0, wait, 0);
    }
}
