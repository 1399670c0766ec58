-- signal/inspect: the owner and the TTL. Read-only.
--
-- KEYS[1]  lock     string   the owner; its TTL is the lease, in whole seconds
-- Returns  nil      free
--          list     {TTL in milliseconds or -1, owner, 1}
local lock = KEYS[1]

local held = redis.call('get', lock)
if not held then return nil end
return {redis.call('pttl', lock), held, 1}
