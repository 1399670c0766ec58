-- fenced/acquire: as reentrant/acquire, and count the token up when the lock goes from free to held. Safe to send twice.
--
-- KEYS[1]  lock     hash     owner -> hold count; its TTL is the lease
-- KEYS[2]  token    string   the last token given, an integer without a TTL
-- ARGV[1]  owner    string   "<client>:<task>"
-- ARGV[2]  lease    integer  milliseconds, at least 1
-- ARGV[3]  holds    integer  the count that this call leads to, at least 1
-- Returns  {1, token}  acquired: the record says `holds`, its TTL is at least `lease`; one without a TTL is left so
--          {0, ttl}    busy: milliseconds until the other owner's lease ends; -1: the record has no TTL
--          -2          LOST: `holds` is above 1, but this owner holds nothing
--          -3          WRONG_KIND: the hash at this name is not a record of this kind
local lock, token, owner, lease, holds = KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]

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

local last = redis.call('get', token)
-- beyond 2^53 Lua's numbers skip integers: two holders would get the same token
if last and (not string.find(last, '^%d+$') or tonumber(last) > 9007199254740990) then
    return redis.error_reply('ERR nestlock: the token key holds no token, an integer below 2^53 - 1')
end
-- never given, or lost: the server's microseconds are above all that were
local now = not last and redis.call('time')
local ttl = held and redis.call('pttl', lock) or 0

if held ~= holds then redis.call('hset', lock, owner, holds) end
local given, refused = last, nil
if not last then
    given = now[1] .. string.format('%06d', now[2])
    refused = redis.pcall('set', token, given).err
elseif not held then
    given = redis.pcall('incr', token)
    refused = type(given) == 'table' and given.err
end
if not refused and ttl ~= -1 and ttl < tonumber(lease) then
    local set = redis.pcall('pexpire', lock, lease)
    refused = type(set) == 'table' and set.err
end
if refused then
    -- take the writes back: a record without a TTL would never end
    if held then redis.call('hset', lock, owner, held) else redis.call('del', lock) end
    if last then redis.call('set', token, last) else redis.call('del', token) end
    return redis.error_reply(refused)
end
return {1, tonumber(given)}
