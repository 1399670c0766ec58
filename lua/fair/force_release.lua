-- fair/force_release: free the lock, whatever its owner; the queue stays. Safe to send twice.
--
-- KEYS[1]  lock     hash     owner -> hold count; its TTL is the lease
-- KEYS[2]  queue    list     waiting owners, the next one first
-- ARGV[1]  channel  string   where waiters listen, each with ":" and its name added
-- Parts    owner
-- Returns  1        free now; the next waiter was notified
--          0        it was free
--          -3       WRONG_KIND: the hash at this name is not a record of this kind
local lock, queue, channel = KEYS[1], KEYS[2], ARGV[1]

local fields = redis.call('hlen', lock)
if fields == 0 then return 0 end
if fields > 1 or not is_owner(redis.call('hkeys', lock)[1]) then return -3 end

-- publish first: if PUBLISH is denied, nothing is written. If the next waiter is gone, the others poll
local head = redis.call('lindex', queue, 0)
if head then redis.call('publish', channel .. ':' .. head, '0') end
redis.call('del', lock)
return 1
