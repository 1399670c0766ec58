-- string/force_release: free the lock, whatever its owner. Safe to send twice.
--
-- KEYS[1]  lock     string   the owner; its TTL is the lease
-- KEYS[2]  fence    string   exists if this name is a guarded value, not a lock
-- Returns  1        free now
--          0        it was free
--          -3       WRONG_KIND: a guarded value; it is untouched
local lock, fence = KEYS[1], KEYS[2]

if not redis.call('get', lock) then return 0 end
if redis.call('exists', fence) == 1 then return -3 end
redis.call('del', lock)
return 1
