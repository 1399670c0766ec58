-- string/force_release: free the lock, whoever holds it. Safe to send twice.
--
-- KEYS[1]  lock     string   the owner; its TTL is the lease
-- Returns  1        free now
--          0        nobody held it
local lock = KEYS[1]

if not redis.call('get', lock) then return 0 end
redis.call('del', lock)
return 1
