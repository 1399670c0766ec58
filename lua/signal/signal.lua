-- signal/signal: wake one waiter if the lock is free, because the waiter woken before is gone. Safe to send twice.
--
-- KEYS[1]  lock     string   the owner; its TTL is the lease, in whole seconds
-- KEYS[2]  signal   list     one element; the waiter that pops it takes it as "free now"
-- ARGV[1]  life     integer  the signal's TTL, in milliseconds
-- Parts    tell_one
-- Returns  1        one waiter is woken
--          0        held: its release will wake one
local life = ARGV[1]

if not string.find(life, '^[1-9]%d*$') or #life > 15 then
    return redis.error_reply('ERR nestlock: life must be an integer of at least 1')
end

if redis.call('get', lock) then return 0 end
return tell_one(life, false)
