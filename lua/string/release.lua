-- string/release: end this owner's hold. Safe to send twice.
--
-- KEYS[1]  lock     string   the owner; its TTL is the lease
-- ARGV[1]  owner    string   "<client>:<task>", or a value of the user's choice
-- Returns  1        free now
--          nil      this owner does not hold it
local lock, owner = KEYS[1], ARGV[1]

if redis.call('get', lock) ~= owner then return nil end
redis.call('del', lock)
return 1
