-- reentrant/acquire: make this owner hold the lock `holds` times, one more than now. Safe to send twice.
--
-- KEYS[1]  lock     hash     owner -> hold count; its TTL is the lease
-- ARGV[1]  owner    string   "<client>:<task>"
-- ARGV[2]  lease    integer  milliseconds, at least 1
-- ARGV[3]  holds    integer  the count that this call leads to, at least 1
-- Returns  1         acquired: the record says `holds`, its TTL is at least `lease`
--          {0, ttl}  busy: milliseconds until the other owner's lease ends; -1: the record has no TTL
--          -2        LOST: `holds` is above 1, but this owner holds nothing
--          -3        WRONG_KIND: the hash at this name is not a record of this kind
local lock, owner, lease, holds = KEYS[1], ARGV[1], ARGV[2], ARGV[3]

if not string.find(lease, '^[1-9]%d*$') or not string.find(holds, '^[1-9]%d*$') then
    return redis.error_reply('ERR nestlock: lease and holds must be integers of at least 1')
end

local fields = redis.call('hlen', lock)
if fields == 0 then
    if holds ~= '1' then return -2 end
    redis.call('hset', lock, owner, holds)
    local set = redis.pcall('pexpire', lock, lease)
    if set ~= 1 then
        -- a record without a TTL would never end: take the write back
        redis.call('del', lock)
        return set
    end
    return 1
end

-- a reader's field has the same name
if fields > 1 and redis.call('hexists', lock, 'mode') == 1 then return -3 end
local held = redis.call('hget', lock, owner)
if held then
    -- the TTL first: where HSET is refused, a longer TTL harms nobody
    if redis.call('pttl', lock) < tonumber(lease) then redis.call('pexpire', lock, lease) end
    if held ~= holds then redis.call('hset', lock, owner, holds) end
    return 1
end

-- a record of this kind has exactly one field, named "<36 characters>:<task>"
if fields > 1 or not string.find(redis.call('hkeys', lock)[1], '^%x+%-%x+%-%x+%-%x+%-%x+:') then return -3 end
if holds ~= '1' then return -2 end
return {0, redis.call('pttl', lock)}
