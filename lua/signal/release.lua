-- signal/release: give the lock up, if this owner holds it, and tell one waiter. Safe to send twice.
--
-- KEYS[1]  lock     string   the owner; its TTL is the lease, in whole seconds
-- KEYS[2]  signal   list     one element, which whoever pops it takes as "free now"
-- ARGV[1]  owner    string   whatever tells owners apart
-- ARGV[2]  holds    integer  the count that this call leads to; 0 frees the lock
-- ARGV[3]  life     integer  of the signal, in milliseconds
-- Returns  1        free now; one waiter is told
--          0        still held
--          nil      this owner does not hold it
local lock, signal, owner, holds, life = KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]

if not string.find(holds, '^[01]$') or not string.find(life, '^[1-9]%d*$') or #life > 15 then
    return redis.error_reply('ERR nestlock: holds must be 0 or 1, life an integer of at least 1')
end

if redis.call('get', lock) ~= owner then return nil end
if holds == '1' then return 0 end

-- first, as it needs no memory: a server that is out of memory lets the next write of this script pass
redis.call('del', signal)
redis.call('lpush', signal, '1')
redis.call('pexpire', signal, life)
redis.call('del', lock)
return 1
