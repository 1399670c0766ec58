-- read_write/read_release_record: read_release where a cluster has the other keys on another node. Safe to send twice.
--
-- KEYS[1]  lock     hash     mode -> read or write, reader -> hold count, writer:write -> hold count; has a TTL
-- ARGV[1]  owner    string   "<client>:<task>"
-- ARGV[2]  holds    string   the count that this call leads to; 0 ends this owner's read holds
--                            n>m: the same as m, if the record says n holds
-- ARGV[3]  channel  string   where waiters listen
-- Parts    fewer
-- Returns  1        free now; all waiters were notified
--          0        still held, by others; the TTL is unchanged
--          nil      this owner does not hold it, or would still read: only the other keys say how long
--          list     CHANGED: {0, holds}: the record does not say n of n>m; nothing was written
local lock, owner, channel = KEYS[1], ARGV[1], ARGV[3]

local mode, held = redis.call('hget', lock, 'mode'), redis.call('hget', lock, owner)
if mode ~= 'read' and mode ~= 'write' or not held then return nil end
if only and held ~= only then return {0, tonumber(held)} end
if holds ~= '0' then return nil end

-- others still read, or this owner still writes. The record lives for at least as long as their holds
if redis.call('hlen', lock) > 2 then
    redis.call('hdel', lock, owner)
    return 0
end
-- publish first: if PUBLISH is denied, nothing is written. No other client runs before this script ends
redis.call('publish', channel, '1')
redis.call('del', lock)
return 1
