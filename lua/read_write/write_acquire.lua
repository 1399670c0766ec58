-- read_write/write_acquire: make this owner write-hold the lock at least `holds` times. Safe to send twice.
--
-- KEYS[1]  lock     hash     mode -> read or write, reader -> hold count, writer:write -> hold count; has a TTL
-- KEYS[2]  intent   string   exists while a writer waits for readers: the last writer that announced it
-- KEYS[3]  readers  zset     waiting reader -> 0: goes before the next writer; 1: before the writer after that;
--                            until -> when the turn of the readers with 0 ends, by the server's clock
-- ARGV[1]  owner    string   "<client>:<task>"
-- ARGV[2]  lease    integer  milliseconds, at least 1
-- ARGV[3]  holds    integer  the count that this call leads to, at least 1
-- ARGV[4]  waits    integer  1: hold new readers back if the lock is busy; 0: do not wait
-- Parts    mode, raises, patience, time
-- Returns  1         acquired: the hold count is at least `holds`, the TTL at least `lease`
--          {0, ttl}  busy: milliseconds until the others' leases end, or until the next try; -1: the record has no TTL
--          -2        LOST: `holds` is above 1, but this owner holds nothing
--          -3        WRONG_KIND: the hash at this name is not a record of this kind
local intent, readers, owner, lease, holds, waits = KEYS[2], KEYS[3], ARGV[1], ARGV[2], ARGV[3], ARGV[4]

if not string.find(lease .. ' ' .. holds .. ' ' .. waits, '^[1-9]%d* [1-9]%d* [01]$') then
    return redis.error_reply('ERR nestlock: lease and holds must be integers of at least 1, waits 0 or 1')
end

local writer = owner .. ':write'
local held, ttl = redis.call('hget', lock, writer), redis.call('pttl', lock)
if holds ~= '1' and not held then return -2 end
if mode and mode ~= 'read' and not held then return {0, ttl} end
-- readers hold it, or it is the turn of readers that waited for the last writer: PATIENCE from a writer's first try on
local waiting, left, begins = not held and redis.call('zcard', readers) or 0, 0, nil
local own = waiting > 0 and redis.call('zscore', readers, owner)
if waiting > 0 and redis.call('zcount', readers, 0, 0) > (own == '0' and 1 or 0) then
    local now, over = server_time(), tonumber(redis.call('zscore', readers, 'until'))
    -- if the server's clock went back, the turn would last longer: start it again
    begins = (not over or over > now + PATIENCE) and now
    left = begins and PATIENCE or over - now
end
if mode == 'read' or left > 0 then
    if waits == '1' then redis.call('set', intent, owner, 'PX', PATIENCE) end
    if begins then redis.pcall('zadd', readers, begins + PATIENCE, 'until') end
    if waits == '0' then return {0, mode and ttl or left} end
    return {0, math.min(mode and ttl or left, math.ceil(PATIENCE / 2))}
end

if held then
    local raised = raises(held, holds, 9)
    if raised then redis.call('hset', lock, writer, holds) end
    -- a record without a TTL keeps none
    local set = (ttl < 0 or ttl >= tonumber(lease)) and 1 or redis.pcall('pexpire', lock, lease)
    if set == 1 then return 1 end
    if raised then redis.call('hset', lock, writer, held) end
    return set
end
redis.call('hset', lock, writer, holds, 'mode', 'write')
local set = redis.pcall('pexpire', lock, lease)
if set ~= 1 then
    -- undo the write: a record without a TTL would never expire
    redis.call('del', lock)
    return set
end
-- pcall: if the server refuses, the key expires soon
redis.pcall('del', intent)
if waiting > 0 then
    -- drop readers whose turn is over; readers that this writer held back go before the next writer
    redis.pcall('zremrangebyscore', readers, 0, 0)
    redis.pcall('zrem', readers, 'until')
    if own == '0' then redis.pcall('zadd', readers, 0, owner) end
    for _, reader in ipairs(redis.pcall('zrangebyscore', readers, 1, 1)) do redis.pcall('zadd', readers, 0, reader) end
    redis.pcall('pexpire', readers, lease + PATIENCE)
end
return 1
