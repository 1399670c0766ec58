-- fenced/acquire: as reentrant/acquire, and count the token up when the lock goes from free to held. Safe to send twice.
--
-- KEYS[1]  lock     hash     owner -> hold count; its TTL is the lease
-- KEYS[2]  token    string   the last token given, an integer without a TTL
-- ARGV[1]  owner    string   "<client>:<task>"
-- ARGV[2]  lease    integer  milliseconds, at least 1
-- ARGV[3]  holds    integer  the count that this call leads to, at least 1
-- Returns  {1, token}  acquired: the record says `holds`, its TTL is at least `lease`
--          {0, ttl}    busy: milliseconds until the other owner's lease ends; -1: the record has no TTL
--          -2          LOST: `holds` is above 1, but this owner holds nothing
--          -3          WRONG_KIND: the hash at this name is not a record of this kind
local lock, token, owner, lease, holds = KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]

if not string.find(lease, '^[1-9]%d*$') or not string.find(holds, '^[1-9]%d*$') then
    return redis.error_reply('ERR nestlock: lease and holds must be integers of at least 1')
end

local fields = redis.call('hlen', lock)
-- a reader's field has the same name
if fields > 1 and redis.call('hexists', lock, 'mode') == 1 then return -3 end
local held = fields > 0 and redis.call('hget', lock, owner)
if fields > 0 and not held then
    -- a record of this kind has exactly one field, named "<36 characters>:<task>"
    if fields > 1 or not string.find(redis.call('hkeys', lock)[1], '^%x+%-%x+%-%x+%-%x+%-%x+:') then return -3 end
    if holds ~= '1' then return -2 end
    return {0, redis.call('pttl', lock)}
end
if not held and holds ~= '1' then return -2 end

local last = redis.call('get', token)
-- beyond 2^53 Lua's numbers skip integers: two holders would get the same token
if last and (not string.find(last, '^%d+$') or tonumber(last) > 9007199254740990) then
    return redis.error_reply('ERR nestlock: the token key holds no token, an integer below 2^53 - 1')
end
local given = last
if not last then
    -- never given, or lost: the server's microseconds are above all that were
    local now = redis.call('time')
    given = now[1] .. string.format('%06d', now[2])
    redis.call('set', token, given)
elseif not held then
    given = redis.call('incr', token)
end

if held then
    -- the TTL first: where HSET is refused, a longer TTL harms nobody
    if redis.call('pttl', lock) < tonumber(lease) then redis.call('pexpire', lock, lease) end
    if held ~= holds then redis.call('hset', lock, owner, holds) end
    return {1, tonumber(given)}
end
redis.call('hset', lock, owner, holds)
local set = redis.pcall('pexpire', lock, lease)
if set ~= 1 then
    -- a record without a TTL would never end: take the writes back
    redis.call('del', lock)
    if last then redis.call('set', token, last) else redis.call('del', token) end
    return set
end
return {1, tonumber(given)}
