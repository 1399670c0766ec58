-- reentrant/force_release: free the lock, whatever its owner. Safe to send twice.
--
-- KEYS[1]  lock     hash     owner -> hold count; its TTL is the lease
-- ARGV[1]  channel  string   where waiters listen; empty: none do
-- Parts    owner
-- Returns  1        free now; waiters were notified
--          0        it was free
--          -3       WRONG_KIND: the hash at this name is not a record of this kind
local lock, channel = KEYS[1], ARGV[1]

local fields = redis.call('hlen', lock)
if fields == 0 then return 0 end
if fields > 1 or not is_owner(redis.call('hgetall', lock)[1]) then return -3 end

-- publish first: if PUBLISH is denied, nothing is written
if channel ~= '' then redis.call('publish', channel, '0') end
redis.call('del', lock)
return 1
