-- read_write/read_acquire: make this owner read-hold the lock at least `holds` times. Safe to send twice.
--
-- KEYS[1]  lock     hash     mode -> read or write, reader -> hold count, writer:write -> hold count; has a TTL
-- KEYS[2]  intent   string   exists while a writer waits for readers
-- KEYS[3]  readers  zset     waiting reader -> 0: goes before the next writer; 1: before the writer after that
-- ARGV[1]  owner    string   "<client>:<task>"
-- ARGV[2]  lease    integer  milliseconds, at least 1
-- ARGV[3]  holds    integer  the count that this call leads to, 1 to 99999: each hold has a key
-- ARGV[4]  hold     string   prefix of the keys of this owner's holds: the number follows; each lives as long as its hold
-- ARGV[5]  waits    integer  1: go before a writer if the lock is busy; 0: do not wait
-- Parts    mode, raises, patience, leave
-- Returns  1         acquired: the hold count is at least `holds`, the TTL that of the longest hold
--          {0, ttl}  busy: milliseconds until the writer's lease ends, or a waiting writer's turn; -1: the record has no TTL
--          -2        LOST: `holds` is above 1, but this owner holds nothing
--          -3        WRONG_KIND: the hash at this name is not a record of this kind
local intent, readers = KEYS[2], KEYS[3]
local owner, lease, holds, hold, waits = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

if not string.find(lease .. ' ' .. waits, '^[1-9]%d* [01]$') or not string.find(holds, '^[1-9]%d?%d?%d?%d?$') then
    return redis.error_reply('ERR nestlock: lease and holds must be integers of at least 1, holds of at most 99999, waits 0 or 1')
end

local held, ttl = redis.call('hget', lock, owner), redis.call('pttl', lock)
if holds ~= '1' and not held then return -2 end

-- pcall: if the server refuses the write, the reply is still "busy"
local function comes_before(writer, lives)
    if waits == '0' then return end
    local left = redis.call('pttl', readers)
    local set = writer == 0 and redis.pcall('zadd', readers, 0, owner) or redis.pcall('zadd', readers, 'NX', 1, owner)
    if type(set) == 'number' and left < lives and redis.pcall('pexpire', readers, lives) ~= 1 then
        redis.call('zrem', readers, owner)
    end
end
if mode == 'write' and redis.call('hexists', lock, owner .. ':write') == 0 then
    comes_before(0, math.max(ttl, 0) + PATIENCE)
    return {0, ttl}
end
-- readers may re-enter, and readers whose turn it is may enter; others let a waiting writer go first
local left = mode ~= 'write' and not held and redis.call('pttl', intent) or 0
if left > 0 and redis.call('zscore', readers, owner) ~= '0' then
    comes_before(1, 2 * PATIENCE)
    -- if the server's clock went back, the key would outlive PATIENCE
    if left > PATIENCE then redis.pcall('pexpire', intent, PATIENCE) end
    return {0, math.min(left, math.ceil(PATIENCE / 2))}
end

-- the request was sent again, or the owner lost track of a hold: its key may exist
left = held and tonumber(held) >= tonumber(holds) and redis.call('pttl', hold .. holds)
-- a server out of memory refuses this first write, before anything is changed
redis.call('set', hold .. holds, '1', 'PX', lease)
local raised = raises(held, holds, 5)
local done, refused = pcall(function()
    if mode then
        if raised then redis.call('hset', lock, owner, holds) end
        -- a record without a TTL keeps none
        if ttl >= 0 and ttl < tonumber(lease) then redis.call('pexpire', lock, lease) end
    else
        redis.call('hset', lock, owner, holds, 'mode', 'read')
        redis.call('pexpire', lock, lease)
    end
end)
if done then
    if not held then leave(readers, owner) end
    return 1
end
-- undo the writes: a record without a TTL would never expire
if not mode then
    redis.pcall('del', lock)
elseif not held then
    redis.pcall('hdel', lock, owner)
elseif raised then
    redis.pcall('hset', lock, owner, held)
end
if left and left > 0 then
    redis.pcall('set', hold .. holds, '1', 'PX', left)
elseif left ~= -1 then
    redis.pcall('del', hold .. holds)
end
return redis.error_reply(refused.err or refused)
