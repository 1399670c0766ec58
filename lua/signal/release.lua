-- signal/release: give the lock up, if this owner holds it, and tell one waiter. Safe to send twice.
--
-- KEYS[1]  lock     string   the owner; its TTL is the lease, in whole seconds
-- KEYS[2]  signal   list     one element; the waiter that pops it takes it as "free now"; left as it is if it is not a list
-- ARGV[1]  owner    string   whatever tells owners apart
-- ARGV[2]  holds    integer  the count that this call leads to; 0 frees the lock
-- ARGV[3]  life     integer  of the signal, in milliseconds
-- Parts    tell_one
-- Returns  1        free now; one waiter is told
--          0        still held
--          nil      this owner does not hold it
local owner, holds, life = ARGV[1], ARGV[2], ARGV[3]

if holds ~= '0' and holds ~= '1' or not string.find(life, '^[1-9]%d*$') or #life > 15 then
    return redis.error_reply('ERR nestlock: holds must be 0 or 1, life an integer of at least 1')
end

if redis.call('get', lock) ~= owner then return nil end
if holds == '1' then return 0 end

return tell_one(life, true)
