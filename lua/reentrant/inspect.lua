-- reentrant/inspect: who holds the lock, how often, for how long. Writes nothing.
--
-- KEYS[1]  lock     hash     owner -> hold count; its TTL is the lease
-- Returns  nil      free
--          list     {TTL in milliseconds or -1, owner, hold count}
--          -3       WRONG_KIND: the hash at this name is not a record of this kind
local lock = KEYS[1]

local fields = redis.call('hlen', lock)
if fields == 0 then return nil end

local owner = redis.call('hkeys', lock)[1]
if fields > 1 or not string.find(owner, '^%x+%-%x+%-%x+%-%x+%-%x+:') then return -3 end
return {redis.call('pttl', lock), owner, tonumber(redis.call('hget', lock, owner))}
