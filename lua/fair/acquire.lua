-- fair/acquire: make this owner hold the lock `holds` times, in his turn. Safe to send twice.
--
-- KEYS[1]  lock      hash     owner -> hold count; its TTL is the lease
-- KEYS[2]  queue     list     waiting owners, the next one first
-- KEYS[3]  timeouts  zset     waiting owner -> when he counts as gone, in milliseconds of the server's clock
-- ARGV[1]  owner     string   "<client>:<task>"
-- ARGV[2]  lease     integer  milliseconds, at least 1
-- ARGV[3]  holds     integer  the count that this call leads to, at least 1
-- ARGV[4]  patience  integer  milliseconds after which a silent waiter counts as gone, at least 1
-- ARGV[5]  waits     integer  1: take a place in the queue if the lock is busy
-- Returns  1                 acquired: the record says `holds`, its TTL is at least `lease`
--          {0, time, ahead}  busy: milliseconds until it is worth looking, and how many wait before this owner
--          -2                LOST: `holds` is above 1, but this owner holds nothing
--          -3                WRONG_KIND: the hash at this name is not a record of this kind
local lock, queue, timeouts = KEYS[1], KEYS[2], KEYS[3]
local owner, lease, holds, patience, waits = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
for _, number in ipairs({lease, holds, patience}) do
    if not string.find(number, '^[1-9]%d*$') then
        return redis.error_reply('ERR nestlock: lease, holds and patience must be integers of at least 1')
    end
end
local held, fields, ttl = redis.call('hget', lock, owner), redis.call('hlen', lock), redis.call('pttl', lock)
-- a reader's field has the same name
if fields > 1 and redis.call('hexists', lock, 'mode') == 1 then return -3 end
if held then
    if ttl < tonumber(lease) then redis.call('pexpire', lock, lease) end
    if held ~= holds then redis.call('hset', lock, owner, holds) end
    return 1
end
if fields > 1 or fields == 1 and not string.find(redis.call('hkeys', lock)[1], '^%x+%-%x+%-%x+%-%x+%-%x+:') then
    return -3
end
if holds ~= '1' then return -2 end

local time, score = redis.call('time'), redis.call('zscore', timeouts, owner)
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local gone = now + math.max(ttl, 0) + patience
local head, deadline, silent = redis.call('lindex', queue, 0), nil, nil
while head and head ~= owner do
    deadline = tonumber(redis.call('zscore', timeouts, head)) or math.huge
    -- whoever is next has this much time, however late his place in the queue let him be
    if deadline > gone then redis.call('zadd', timeouts, gone, head) deadline = gone end
    -- a client that lets one waiter be silent is gone, and so are its others who are next
    local client = string.match(head, '^[^:]*')
    if deadline > now and client ~= silent then break end
    silent = client
    redis.call('lpop', queue)
    redis.call('zrem', timeouts, head)
    head = redis.call('lindex', queue, 0)
end
if fields == 0 and (not head or head == owner) then
    redis.call('hset', lock, owner, holds)
    local set = redis.pcall('pexpire', lock, lease)
    if set ~= 1 then
        -- a record without a TTL would never end: take the write back
        redis.call('del', lock)
        return set
    end
    if head then redis.call('lpop', queue) end
    if score then redis.call('zrem', timeouts, owner) end
    return 1
end

local place = redis.call('lpos', queue, owner)
if waits == '1' and place then
    if (tonumber(score) or 0) < gone then redis.call('zadd', timeouts, gone, owner) end
elseif waits == '1' then
    place = redis.call('llen', queue)
    local last = redis.call('lindex', queue, -1)
    local after = last and tonumber(redis.call('zscore', timeouts, last)) or gone - patience
    redis.call('zadd', timeouts, math.min(after + patience, gone + place * patience), owner)
    redis.call('rpush', queue, owner)
end
-- a look keeps the place, so that a third of the patience is the longest sleep
local hint = fields == 0 and deadline - now or ttl >= 0 and ttl or patience
return {0, math.min(hint, math.ceil(patience / 3)), place or redis.call('llen', queue)}
