-- read_write/write_acquire: make this owner write-hold the lock at least `holds` times. Safe to send twice.
--
-- KEYS[1]  lock     hash     mode -> read or write, reader -> hold count, writer:write -> hold count; has a TTL
-- KEYS[2]  intent   string   there while a writer waits for readers: the last one that said so
-- ARGV[1]  owner    string   "<client>:<task>"
-- ARGV[2]  lease    integer  milliseconds, at least 1
-- ARGV[3]  holds    integer  the count that this call leads to, at least 1
-- ARGV[4]  patience integer  milliseconds for which new readers are held back, at least 1; 0: the caller does not wait
-- Parts    mode, raises
-- Returns  1         acquired: the record says `holds`, or more, its TTL is at least `lease`
--          {0, ttl}  busy: milliseconds until the others' leases end; -1: the record has no TTL
--          -2        LOST: `holds` is above 1, but this owner holds nothing
--          -3        WRONG_KIND: the hash at this name is not a record of this kind
local intent, owner, lease, holds, patience = KEYS[2], ARGV[1], ARGV[2], ARGV[3], ARGV[4]

if not string.find(lease, '^[1-9]%d*$') or not string.find(holds, '^[1-9]%d*$') then
    return redis.error_reply('ERR nestlock: lease and holds must be integers of at least 1')
end

local writer = owner .. ':write'
local held, ttl = redis.call('hget', lock, writer), redis.call('pttl', lock)
if holds ~= '1' and not held then return -2 end
if mode == 'read' then
    if patience == '0' then return {0, ttl} end
    redis.call('set', intent, owner, 'PX', patience)
    return {0, math.min(ttl, math.ceil(patience / 2))}
end
if mode and not held then return {0, ttl} end

if held then
    local raised = raises(held, holds, 9)
    if raised then redis.call('hset', lock, writer, holds) end
    -- a record without a TTL is left so
    local set = (ttl < 0 or ttl >= tonumber(lease)) and 1 or redis.pcall('pexpire', lock, lease)
    if set == 1 then return 1 end
    if raised then redis.call('hset', lock, writer, held) end
    return set
end
redis.call('hset', lock, writer, holds, 'mode', 'write')
local set = redis.pcall('pexpire', lock, lease)
if set ~= 1 then
    -- a record without a TTL would never end: take the write back
    redis.call('del', lock)
    return set
end
-- left behind, it is over soon
redis.pcall('del', intent)
return 1
