-- fair/acquire: make this owner hold the lock at least `holds` times, in turn. Safe to send twice.
--
-- KEYS[1]  lock      hash     owner -> hold count; its TTL is the lease
-- KEYS[2]  queue     list     waiting owners, the next one first
-- KEYS[3]  timeouts  zset     waiting owner -> when it expires for Redisson, in milliseconds since 1970
-- KEYS[4]  seen      zset     waiting owner of ours -> when it expires, in milliseconds of the server's clock, plus its
--                             turn / 1024; cut -> the score that was lowered last; clock -> when a score was
--                             written last
-- ARGV[1]  owner     string   "<client>:<task>"
-- ARGV[2]  lease     integer  milliseconds, at least 1
-- ARGV[3]  holds     integer  the count that this call leads to, at least 1
-- ARGV[4]  patience  integer  milliseconds after which a silent waiter expires, at least 1
-- ARGV[5]  waits     integer  1: take a place in the queue if the lock is busy
--                             2 to 1023: the same, and fair/release may grant the lock. The value is this wait's turn, a number
--                             that the owner has not used recently
-- ARGV[6]  channel   string   where waiters listen, each with ":" and its name added
-- Parts    owner, raises, time, clock
-- Returns  1                 acquired: the hold count is at least `holds`, the TTL at least `lease`
--          {0, time, ahead}  busy: milliseconds until the next try, and how many wait before it (17: or more);
--                            with a turn, also its score in KEYS[4], as text
--          -2                LOST: `holds` is above 1, but this owner holds nothing
--          -3                WRONG_KIND: the hash at this name is not a record of this kind
local lock, queue = KEYS[1], KEYS[2]
local owner, lease, holds, patience, waits, channel = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
if not string.find(lease .. ' ' .. holds .. ' ' .. patience .. ' ' .. waits, '^[1-9]%d* [1-9]%d* [1-9]%d* %d+$') then
    return redis.error_reply('ERR nestlock: lease, holds and patience must be integers of at least 1, waits one of at least 0')
end
local held, fields, ttl = redis.call('hget', lock, owner), redis.call('hlen', lock), redis.call('pttl', lock)
-- a read-write lock's reader has a field of the same name
if fields > 1 and redis.call('hexists', lock, 'mode') == 1 then return -3 end
if held then
    local raised = raises(held, holds, 9) and redis.call('hset', lock, owner, holds)
    -- a record without a TTL keeps none
    local set = (ttl == -1 or ttl >= tonumber(lease)) and 1 or redis.pcall('pexpire', lock, lease)
    if set ~= 1 and raised then redis.call('hset', lock, owner, held) end
    return set
end
if fields > 0 and not is_owner(fields == 1 and redis.call('hkeys', lock)[1] or '') then return -3 end
if holds ~= '1' then return -2 end

local head, dead, free, due, foreign = redis.call('lindex', queue, 0), {}, fields == 0, nil, nil
-- a free lock without a queue needs no clock
if head or not free then look_at_clock() end
local score, known = redis.call('zscore', timeouts, owner), seen_until(owner)
while head and head ~= owner do
    local here = seen_until(head)
    -- a Redisson waiter cannot report that it is alive: it expires by Redisson's score, once the lock is free
    foreign, due = not here, tonumber(here or free and redis.call('zscore', timeouts, head)) or math.huge
    if due > now then break end
    dead[#dead + 1] = head
    head = redis.call('lindex', queue, #dead)
end
local mine = free and (not head or head == owner)
-- the lock is free for a Redisson waiter that may have missed the message. If others wait behind it, it has one patience from
-- now on, or a tenth of one if it is not subscribed and a waiter before it was skipped as well
local told = free and not mine and (#dead > 0 or foreign and waits ~= '0' and due > now + patience)
-- publish first: if PUBLISH is denied, nothing is written
local heard = told and redis.call('publish', channel .. ':' .. head, '0')
-- the waiter whose score was lowered last did not come, and a Redisson client has removed it
local cut = heard == 0 and seen_until('cut') or math.huge
local limit = now + (heard == 0 and (#dead > 0 or cut <= now and now < cut + patience) and math.ceil(patience / 10) or patience)
-- a refused script must change nothing: probe each command first, in a form without effect
local function ask()
    redis.call('zrem', timeouts, '')
    redis.call('ltrim', queue, 0, -1)
end
local function put_out()
    if #dead > 0 then redis.call('ltrim', queue, #dead, -1) end
    -- in chunks: `unpack` is limited by Lua's stack
    for at = 1, #dead, 1000 do
        redis.call('zrem', timeouts, unpack(dead, at, math.min(at + 999, #dead)))
        redis.call('zrem', seen, 'cut', unpack(dead, at, math.min(at + 999, #dead)))
    end
    if #dead > 0 and redis.pcall('zcard', seen) == 1 then redis.call('zrem', seen, 'clock') end
end
if mine then
    if head or score or known then dead[#dead + 1] = owner end
    redis.call('hset', lock, owner, holds)
    local set, asked, refused = redis.pcall('pexpire', lock, lease), true, nil
    if set == 1 and #dead > 0 then asked, refused = pcall(ask) end
    if set == 1 and asked then
        return put_out() or 1
    end
    -- undo the write: a record without a TTL would never expire
    redis.call('del', lock)
    return asked and set or redis.error_reply(refused.err or refused)
end

-- scores as Redisson writes them, with its default wait, which a served Redisson client subtracts from all scores
local length, free_at, wait = redis.call('llen', queue) - #dead, now + math.max(ttl, 0), math.max(patience, 300000)
local safe, stale, turn = free_at + wait, {}, waits > '1' and waits / 1024 or 0
-- a place further back is taken from the scores; if one of the keys was deleted, the whole queue is searched
local at = redis.call('lpos', queue, owner, 'maxlen', #dead + 17)
if not at and length > 17 then
    at = known and score and #dead + 17 or (known or score) and redis.call('lpos', queue, owner)
end
local place = at and at - #dead
-- a try soon after another writes nothing
local fresh = math.min(known or 0, (tonumber(score) or 0) - ahead - safe + now + patience) > now + patience * 2 / 3
local writes = waits ~= '0' and not (place and fresh and known % 1 == turn)
local joins = writes and not place
if writes then
    local ours = redis.call('zmscore', seen, owner, unpack(redis.call('lrange', queue, #dead, #dead + 16)))
    for before = 1, math.min(place or length, 17) do
        safe = safe + (ours[before + 1] and patience or wait)
    end
end
if joins then
    if length > 16 then
        local after = redis.call('zscore', timeouts, redis.call('lindex', queue, -1) or '')
        safe = math.max(safe, math.min((tonumber(after) or 0) + wait, free_at + (length + 1) * wait))
    end
    -- entries older than a day, whose waiters another client removed from the queue without them
    stale = redis.call('zrangebyscore', seen, '-inf', now - 86400000, 'limit', 0, 10)
end

if #dead + #stale > 0 then ask() end
-- RPUSH has no form without effect, but can be undone
if joins then redis.call('rpush', queue, owner) end
if joins or #dead > 0 then
    local none = redis.pcall('zadd', timeouts, 'XX', 0, '')
    if none ~= 0 then
        if joins then redis.call('ltrim', queue, 0, -2) end
        return none
    end
end
go_back()
put_out()
if #stale > 0 then redis.call('zrem', seen, unpack(stale)) end
if told and foreign and waits ~= '0' and due > limit then
    due = limit
    redis.call('zadd', timeouts, due, head)
    redis.call('zadd', seen, due, 'cut')
end
if writes then
    if not place or place < 17 or (tonumber(score) or 0) < safe then redis.call('zadd', timeouts, safe, owner) end
    redis.call('zadd', seen, string.format('%.17g', now + patience + turn), owner, now, 'clock')
end
-- each try keeps the place, so a waiter must sleep at most a third of the patience
return {0, math.min(free and due - now or ttl >= 0 and ttl or patience, math.ceil(patience / 3)), place or length,
    turn > 0 and redis.call('zscore', seen, owner) or nil}
