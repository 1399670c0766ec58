-- signal/force_release: free the lock, whoever holds it, and tell one waiter. Safe to send twice.
--
-- KEYS[1]  lock     string   the owner; its TTL is the lease, in whole seconds
-- KEYS[2]  signal   list     one element, which whoever pops it takes as "free now"; left as it is if it is no list
-- ARGV[1]  life     integer  of the signal, in milliseconds
-- Parts    tell_one
-- Returns  1        free now
--          0        nobody held it; one waiter is told all the same
local life = ARGV[1]

if not string.find(life, '^[1-9]%d*$') or #life > 15 then
    return redis.error_reply('ERR nestlock: life must be an integer of at least 1')
end

local held = redis.call('get', lock)
local done = tell_one(life, true)
if done ~= 1 then return done end
return held and 1 or 0
