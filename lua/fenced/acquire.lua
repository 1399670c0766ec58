-- fenced/acquire: as reentrant/acquire, and count the token up when the lock goes from free to held. Safe to send twice.
--
-- KEYS[1]  lock     hash     owner -> hold count; its TTL is the lease
-- KEYS[2]  token    string   the last token given, an integer without a TTL
-- ARGV[1]  owner    string   "<client>:<task>"
-- ARGV[2]  lease    integer  milliseconds, at least 1
-- ARGV[3]  holds    integer  the count that this call leads to, at least 1
-- Parts    owner, claim, raises
-- Returns  {1, token}  acquired: the record says `holds`, or more, its TTL is at least `lease`; one without a TTL is left so
--          {0, ttl}    busy: milliseconds until the other owner's lease ends; -1: the record has no TTL
--          -2          LOST: `holds` is above 1, but this owner holds nothing
--          -3          WRONG_KIND: the hash at this name is not a record of this kind
local token = KEYS[2]

local last = redis.call('get', token)
-- beyond 2^53 Lua's numbers skip integers: two holders would get the same token
if last and (not string.find(last, '^%d+$') or tonumber(last) > 9007199254740990) then
    return redis.error_reply('ERR nestlock: the token key holds no token, an integer below 2^53 - 1')
end
-- never given, or lost: the server's microseconds are above all that were
local now = not last and redis.call('time')

local raised = raises(held, holds, 9)
if raised then redis.call('hset', lock, owner, holds) end
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
    if not held then redis.call('del', lock) elseif raised then redis.call('hset', lock, owner, held) end
    if last then redis.call('set', token, last) else redis.call('del', token) end
    return redis.error_reply(refused)
end
return {1, tonumber(given)}
