-- read_write/read_acquire: make this owner read-hold the lock at least `holds` times. Safe to send twice.
--
-- KEYS[1]  lock     hash     mode -> read or write, reader -> hold count, writer:write -> hold count; has a TTL
-- KEYS[2]  intent   string   there while a writer waits for readers
-- KEYS[3]  readers  zset     reader that waits -> 0: comes before the next writer; 1: before the one after
-- ARGV[1]  owner    string   "<client>:<task>"
-- ARGV[2]  lease    integer  milliseconds, at least 1
-- ARGV[3]  holds    integer  the count that this call leads to, 1 to 99999: each hold has a key
-- ARGV[4]  hold     string   the keys of this owner's holds, without their numbers; each lives as long as its hold
-- ARGV[5]  waits    integer  1: come before a writer if the lock is busy; 0
-- Parts    mode, raises, patience, leave
-- Returns  1         acquired: the record says `holds`, or more, and lives as long as its longest hold
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

-- where nothing can be written, the lock is busy all the same
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
-- current readers may read again, and readers whose turn it is come in; others let a waiting writer go first
local left = mode ~= 'write' and not held and redis.call('pttl', intent) or 0
if left > 0 and redis.call('zscore', readers, owner) ~= '0' then
    comes_before(1, 2 * PATIENCE)
    -- a clock that went back makes it live longer than any is written for
    if left > PATIENCE then redis.pcall('pexpire', intent, PATIENCE) end
    return {0, math.min(left, math.ceil(PATIENCE / 2))}
end

-- sent again, or a hold that was lost sight of: its key may be there
left = held and tonumber(held) >= tonumber(holds) and redis.call('pttl', hold .. holds)
-- what is out of memory is refused here, before anything is written
redis.call('set', hold .. holds, '1', 'PX', lease)
local raised = raises(held, holds, 5)
local done, refused = pcall(function()
    if mode then
        if raised then redis.call('hset', lock, owner, holds) end
        -- a record without a TTL is left so
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
-- take back what was written: a record without a TTL would never end
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
