-- signal/release: release the lock if this owner holds it, and wake one waiter. Safe to send twice.
--
-- KEYS[1]  lock     string   the owner; its TTL is the lease, in whole seconds
-- KEYS[2]  signal   list     one element; the waiter that pops it takes it as "free now"; untouched if it is not a list
-- ARGV[1]  owner    string   any text that tells owners apart
-- ARGV[2]  holds    integer  the count that this call leads to; 0 frees the lock
-- ARGV[3]  life     integer  the signal's TTL, in milliseconds
-- Parts    tell_one
-- Returns  1        free now; one waiter is woken
--          0        still held
--          nil      this owner does not hold it
local owner, holds, life = ARGV[1], ARGV[2], ARGV[3]

if holds ~= '0' and holds ~= '1' or not string.find(life, '^[1-9]%d*$') or #life > 15 then
    return redis.error_reply('ERR nestlock: holds must be 0 or 1, life an integer of at least 1')
end

if redis.call('get', lock) ~= owner then return nil end
if holds == '1' then return 0 end

return tell_one(life, true)
