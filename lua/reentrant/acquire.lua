-- reentrant/acquire: make this owner hold the lock `holds` times, one more than now. Safe to send twice.
--
-- KEYS[1]  lock     hash     owner -> hold count; its TTL is the lease
-- ARGV[1]  owner    string   "<client>:<task>"
-- ARGV[2]  lease    integer  milliseconds, at least 1
-- ARGV[3]  holds    integer  the count that this call leads to, at least 1
-- Returns  1         acquired: the record says `holds`, its TTL is at least `lease`; one without a TTL is left so
--          {0, ttl}  busy: milliseconds until the other owner's lease ends; -1: the record has no TTL
--          -2        LOST: `holds` is above 1, but this owner holds nothing
--          -3        WRONG_KIND: the hash at this name is not a record of this kind
local lock, owner, lease, holds = KEYS[1], ARGV[1], ARGV[2], ARGV[3]

local fields, held = redis.call('hlen', lock), nil
-- a record of this kind has exactly one field, named "<36 characters>:<task>"
if fields > 1 then return -3 end
if fields == 1 then
    local record = redis.call('hgetall', lock)
    if not string.find(record[1], '^%x+%-%x+%-%x+%-%x+%-%x+:') then return -3 end
    if record[1] == owner then
        held = record[2]
    elseif holds == '1' then
        return {0, redis.call('pttl', lock)}
    end
end

if not string.find(lease, '^[1-9]%d*$') or not string.find(holds, '^[1-9]%d*$') then
    return redis.error_reply('ERR nestlock: lease and holds must be integers of at least 1')
end
if not held and holds ~= '1' then return -2 end

local ttl = held and redis.call('pttl', lock) or 0
if held ~= holds then redis.call('hset', lock, owner, holds) end
if ttl ~= -1 and ttl < tonumber(lease) then
    local set = redis.pcall('pexpire', lock, lease)
    if set ~= 1 then
        -- take the write back: a record without a TTL would never end
        if held then redis.call('hset', lock, owner, held) else redis.call('del', lock) end
        return set
    end
end
return 1
