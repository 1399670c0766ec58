-- fair/release: make this owner hold the lock `holds` times, fewer than now; 0 leaves the queue. Safe to send twice.
--
-- KEYS[1]  lock      hash     owner -> hold count; its TTL is the lease
-- KEYS[2]  queue     list     waiting owners, the next one first
-- KEYS[3]  timeouts  zset     waiting owner -> when Redisson takes it as gone, in milliseconds since 1970
-- KEYS[4]  seen      zset     waiting owner of ours -> when it counts as gone, in milliseconds of the server's clock;
--                             cut -> the last score that was lowered by fair/acquire
-- ARGV[1]  owner     string   "<client>:<task>"
-- ARGV[2]  holds     string   the count that this call leads to; 0 frees the lock
--                             n>m: the same as m, if the record says n holds
-- ARGV[3]  channel   string   where waiters listen, each with ":" and its name added
-- Parts    fewer
-- Returns  1         free now; the next waiter was told
--          0         still held, at most `holds` times; the TTL is as it was
--          nil       this owner does not hold it, nor wait any more, whatever else is at the lock's name
--          list      CHANGED: {0, holds}: not the n holds of n>m; nothing was written
local lock, queue, timeouts, seen = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local owner, channel = ARGV[1], ARGV[3]
-- a reader's field has the same name; with 0, a key of another type is somebody else's lock
local mode = redis.pcall('hexists', lock, 'mode')
if holds ~= '0' and mode ~= 0 and mode ~= 1 then return mode end
local held = mode == 0 and redis.call('hget', lock, owner)
if only and not held then return nil end
if only and held ~= only then return {0, tonumber(held)} end
if holds ~= '0' then
    if not held then return nil end
    if tonumber(held) > tonumber(holds) then
        -- a write that needs no memory lets the next one pass on a server that is out of memory
        redis.call('hdel', lock, '')
        redis.call('hset', lock, owner, holds)
    end
    return 0
end

local others = mode == 0 and redis.call('hlen', lock) - (held and 1 or 0) or 1
local head, dead = redis.call('lindex', queue, 0), {}
-- a holder does not wait: no walk through a long queue for it
local waits = redis.call('zscore', timeouts, owner) or not held
-- a key of another type is refused before anything is written
if waits then redis.call('zscore', seen, owner) end
if head and others == 0 and (held or head == owner) then
    local time, at = redis.call('time'), 0
    local now = time[1] * 1000 + math.floor(time[2] / 1000)
    while head do
        local due = redis.call('zscore', seen, head) or redis.call('zscore', timeouts, head)
        if head ~= owner and (tonumber(due) or math.huge) > now then break end
        if head ~= owner then dead[#dead + 1] = head end
        at = at + 1
        head = redis.call('lindex', queue, at)
    end
    -- told first: where PUBLISH is refused, nothing is written. Nobody runs before this script ends
    if head then redis.call('publish', channel .. ':' .. head, '0') end
end
if waits then dead[#dead + 1] = owner end
-- what the server may refuse is refused before anything is written
if #dead > 0 then redis.call('zrem', timeouts, '') redis.call('lrem', queue, 1, '') end
-- DEL and HDEL work when the server is out of memory; other fields are not ours to delete
if held and others == 0 then redis.call('del', lock) elseif held then redis.call('hdel', lock, owner) end
for _, waiter in ipairs(dead) do
    redis.call('lrem', queue, waiter == owner and 0 or 1, waiter)
    redis.call('zrem', timeouts, waiter)
    redis.call('zrem', seen, waiter, 'cut')
end
return held and 1 or nil
