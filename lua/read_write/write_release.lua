-- read_write/write_release: make this owner write-hold the lock `holds` times, fewer than now. Safe to send twice.
--
-- KEYS[1]  lock     hash     mode -> read or write, reader -> hold count, writer:write -> hold count; has a TTL
-- KEYS[2]  intent   string   there while a writer waits for readers: the last one that said so
-- ARGV[1]  owner    string   "<client>:<task>"
-- ARGV[2]  holds    integer  the count that this call leads to; 0 ends this owner's writing, and his waiting
-- ARGV[3]  channel  string   where waiters listen
-- Returns  1        no writer any more, perhaps this owner still reads; all waiters were told
--          0        still held, at most `holds` times; the TTL is as it was
--          nil      this owner does not hold it
local lock, intent, owner, holds, channel = KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]

if holds ~= '0' and not string.find(holds, '^[1-9]%d*$') then
    return redis.error_reply('ERR nestlock: holds must be an integer of at least 0')
end

local held = redis.call('hget', lock, owner .. ':write')
if not held then
    if holds == '0' and redis.call('get', intent) == owner then
        redis.call('publish', channel, '1')
        redis.call('del', intent)
    end
    return nil
end
if holds ~= '0' then
    if tonumber(held) > tonumber(holds) then
        -- a write that needs no memory lets the next one pass on a server that is out of memory
        redis.call('hdel', lock, '')
        redis.call('hset', lock, owner .. ':write', holds)
    end
    return 0
end

-- told first: where PUBLISH is refused, nothing is written. Nobody runs before this script ends
redis.call('publish', channel, '1')
redis.call('hdel', lock, owner .. ':write')
if redis.call('hlen', lock) > 1 then
    redis.call('hset', lock, 'mode', 'read')
else
    redis.call('del', lock)
end
return 1
