-- signal/force_release: free the lock, whatever its owner, and wake one waiter. Safe to send twice.
--
-- KEYS[1]  lock     string   the owner; its TTL is the lease, in whole seconds
-- KEYS[2]  signal   list     one element; the waiter that pops it takes it as "free now"; untouched if it is not a list
-- ARGV[1]  life     integer  the signal's TTL, in milliseconds
-- Parts    tell_one
-- Returns  1        free now
--          0        it was free; one waiter is woken all the same
local life = ARGV[1]

if not string.find(life, '^[1-9]%d*$') or #life > 15 then
    return redis.error_reply('ERR nestlock: life must be an integer of at least 1')
end

local held = redis.call('get', lock)
local done = tell_one(life, true)
if done ~= 1 then return done end
return held and 1 or 0
