-- reentrant/inspect: the owner, its hold count and the TTL. Read-only.
--
-- KEYS[1]  lock     hash     owner -> hold count; its TTL is the lease
-- Parts    owner
-- Returns  nil      free
--          list     {TTL in milliseconds or -1, owner, hold count}
--          -3       WRONG_KIND: the hash at this name is not a record of this kind
local lock = KEYS[1]

local fields = redis.call('hlen', lock)
if fields == 0 then return nil end

if fields > 1 then return -3 end
local record = redis.call('hgetall', lock)
local owner, holds = record[1], record[2]
if not is_owner(owner) or not string.find(holds, '^%d+$') then return -3 end
return {redis.call('pttl', lock), owner, tonumber(holds)}
