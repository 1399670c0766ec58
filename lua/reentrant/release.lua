-- reentrant/release: make this owner hold the lock `holds` times, fewer than now. Safe to send twice.
--
-- KEYS[1]  lock     hash     owner -> hold count; its TTL is the lease
-- ARGV[1]  owner    string   "<client>:<task>"
-- ARGV[2]  holds    string   the count that this call leads to; 0 frees the lock
--                            n>m: the same as m, if the record says n holds
-- ARGV[3]  channel  string   where waiters listen; empty: none do
-- Parts    fewer, held
-- Returns  1        free now; waiters were notified
--          0        still held, at most `holds` times; the TTL is unchanged
--          nil      this owner does not hold it
--          list     CHANGED: {0, holds}: the record does not say n of n>m; nothing was written
local lock, owner, channel = KEYS[1], ARGV[1], ARGV[3]

local held = held_by(lock, owner)
if not held then return nil end
if only and held ~= only then return {0, tonumber(held)} end

if holds ~= '0' then
    if tonumber(held) > tonumber(holds) then
        -- out of memory, a server denies only a script's first write, and never HDEL: this lets later writes pass
        redis.call('hdel', lock, '')
        redis.call('hset', lock, owner, holds)
    end
    return 0
end

-- publish first: if PUBLISH is denied, nothing is written. No other client runs before this script ends
if channel ~= '' then redis.call('publish', channel, '0') end
-- works when the server is out of memory. Other fields are not ours to delete; the record goes with its last field
redis.call('hdel', lock, owner)
return 1
