-- fair/release: make this owner hold the lock `holds` times, fewer than now; 0 leaves the queue. Safe to send twice.
--
-- KEYS[1]  lock      hash     owner -> hold count; its TTL is the lease
-- KEYS[2]  queue     list     waiting owners, the next one first
-- KEYS[3]  timeouts  zset     waiting owner -> when he counts as gone, in milliseconds of the server's clock
-- ARGV[1]  owner     string   "<client>:<task>"
-- ARGV[2]  holds     integer  the count that this call leads to; 0 frees the lock
-- ARGV[3]  channel   string   where waiters listen, each with ":" and his name added
-- Returns  1         free now; the next waiter was told
--          0         still held, at most `holds` times; the TTL is as it was
--          nil       this owner does not hold it, nor wait any more
local lock, queue, timeouts, owner, holds, channel = KEYS[1], KEYS[2], KEYS[3], ARGV[1], ARGV[2], ARGV[3]

if holds ~= '0' and not string.find(holds, '^[1-9]%d*$') then
    return redis.error_reply('ERR nestlock: holds must be an integer of at least 0')
end
-- a reader's field has the same name
local held = redis.call('hexists', lock, 'mode') == 0 and redis.call('hget', lock, owner)
if holds ~= '0' then
    if not held then return nil end
    if tonumber(held) > tonumber(holds) then
        -- a write that needs no memory lets the next one pass on a server that is out of memory
        redis.call('hdel', lock, '')
        redis.call('hset', lock, owner, holds)
    end
    return 0
end

local others = redis.call('hlen', lock) - (held and 1 or 0)
local waits = redis.call('zscore', timeouts, owner)
-- a holder does not wait: no walk through a long queue for him
local place = (waits or not held) and redis.call('lpos', queue, owner)
if others == 0 and (held or place == 0) then
    local time, at = redis.call('time'), 0
    local now = time[1] * 1000 + math.floor(time[2] / 1000)
    local head = redis.call('lindex', queue, at)
    while head and (head == owner or (tonumber(redis.call('zscore', timeouts, head)) or math.huge) <= now) do
        at = at + 1
        head = redis.call('lindex', queue, at)
    end
    -- told first: where PUBLISH is refused, nothing is written. Nobody runs before this script ends
    if head then redis.call('publish', channel .. ':' .. head, '0') end
end
if place then redis.call('lrem', queue, 0, owner) end
if waits then redis.call('zrem', timeouts, owner) end
if not held then return nil end
-- DEL and HDEL work when the server is out of memory; other fields are not ours to delete
if others == 0 then redis.call('del', lock) else redis.call('hdel', lock, owner) end
return 1
