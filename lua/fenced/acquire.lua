-- fenced/acquire: as reentrant/acquire, and count the token up when the lock goes from free to held. Safe to send twice.
--
-- KEYS[1]  lock     hash     owner -> hold count; its TTL is the lease
-- KEYS[2]  token    string   the last token issued, an integer without a TTL
-- ARGV[1]  owner    string   "<client>:<task>"
-- ARGV[2]  lease    integer  milliseconds, at least 1
-- ARGV[3]  holds    integer  the count that this call leads to, at least 1
-- Parts    owner, claim, raises, token
-- Returns  {1, token}  acquired: the count is at least `holds`, the TTL at least `lease`; a record without a TTL keeps none
--          {0, ttl}    busy: milliseconds until the other owner's lease ends; -1: the record has no TTL
--          -2          LOST: `holds` is above 1, but this owner holds nothing
--          -3          WRONG_KIND: the hash at this name is not a record of this kind
local raised = raises(held, holds, 9)
if raised then redis.call('hset', lock, owner, holds) end
local given, refused = last, nil
if not last or not held then given, refused = next_token() end
if not refused and ttl ~= -1 and ttl < tonumber(lease) then
    local set = redis.pcall('pexpire', lock, lease)
    refused = type(set) == 'table' and set.err
end
if refused then
    -- undo the writes: a record without a TTL would never expire
    if not held then redis.call('del', lock) elseif raised then redis.call('hset', lock, owner, held) end
    take_token_back()
    return redis.error_reply(refused)
end
return {1, tonumber(given)}
