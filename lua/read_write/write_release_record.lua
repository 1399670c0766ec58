-- read_write/write_release_record: write_release where a cluster has the other keys on another node. Safe to send twice.
--
-- KEYS[1]  lock     hash     mode -> read or write, reader -> hold count, writer:write -> hold count; has a TTL
-- ARGV[1]  owner    string   "<client>:<task>"
-- ARGV[2]  holds    string   the count that this call leads to; 0 ends this owner's write holds
--                            n>m: the same as m, if the record says n holds
-- ARGV[3]  channel  string   where waiters listen
-- Parts    fewer
-- Returns  1        no writer any more; all waiters were notified
--          0        still held, at most `holds` times; the TTL is unchanged
--          nil      this owner does not hold it, or would still read: only the other keys say how long
--          list     CHANGED: {0, holds}: the record does not say n of n>m; nothing was written
local lock, owner, channel = KEYS[1], ARGV[1], ARGV[3]

local held = redis.call('hget', lock, owner .. ':write')
if not held then return nil end
if only and held ~= only then return {0, tonumber(held)} end
if holds ~= '0' then
    if tonumber(held) > tonumber(holds) then
        -- out of memory, a server denies only a script's first write, and never HDEL: this lets later writes pass
        redis.call('hdel', lock, '')
        redis.call('hset', lock, owner .. ':write', holds)
    end
    return 0
end

if redis.call('hexists', lock, owner) == 1 then return nil end
-- publish first: if PUBLISH is denied, nothing is written. No other client runs before this script ends
redis.call('publish', channel, '1')
redis.call('del', lock)
return 1
