-- signal/force_release: free the lock, whoever holds it, and tell one waiter. Safe to send twice.
--
-- KEYS[1]  lock     string   the owner; its TTL is the lease, in whole seconds
-- KEYS[2]  signal   list     one element, which whoever pops it takes as "free now"
-- ARGV[1]  life     integer  of the signal, in milliseconds
-- Returns  1        free now
--          0        nobody held it; one waiter is told all the same
local lock, signal, life = KEYS[1], KEYS[2], ARGV[1]

if not string.find(life, '^[1-9]%d*$') or #life > 15 then
    return redis.error_reply('ERR nestlock: life must be an integer of at least 1')
end

local held = redis.call('get', lock)
-- first, as it needs no memory: a server that is out of memory lets the next write of this script pass
redis.call('del', signal)
redis.call('lpush', signal, '1')
redis.call('pexpire', signal, life)
if not held then return 0 end
redis.call('del', lock)
return 1
