-- reentrant/release: make this owner hold the lock `holds` times, fewer than now. Safe to send twice.
--
-- KEYS[1]  lock     hash     owner -> hold count; its TTL is the lease
-- ARGV[1]  owner    string   "<client>:<task>"
-- ARGV[2]  holds    integer  the count that this call leads to; 0 frees the lock
-- ARGV[3]  channel  string   where waiters listen; empty: nobody does
-- Returns  1        free now; waiters were told
--          0        still held, at most `holds` times; the TTL is as it was
--          nil      this owner does not hold it
local lock, owner, holds, channel = KEYS[1], ARGV[1], ARGV[2], ARGV[3]

if holds ~= '0' and not string.find(holds, '^[1-9]%d*$') then
    return redis.error_reply('ERR nestlock: holds must be an integer of at least 0')
end

local held, fields = redis.call('hget', lock, owner), redis.call('hlen', lock)
-- a reader's field has the same name
if not held or fields > 1 and redis.call('hexists', lock, 'mode') == 1 then return nil end

if holds ~= '0' then
    if tonumber(held) > tonumber(holds) then
        -- a write that needs no memory lets the next one pass on a server that is out of memory
        redis.call('hdel', lock, '')
        redis.call('hset', lock, owner, holds)
    end
    return 0
end

-- told first: where PUBLISH is refused, nothing is written. Nobody runs before this script ends
if channel ~= '' then redis.call('publish', channel, '0') end
-- DEL and HDEL work when the server is out of memory; other fields are not ours to delete
if fields == 1 then
    redis.call('del', lock)
else
    redis.call('hdel', lock, owner)
end
return 1
