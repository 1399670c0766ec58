-- reentrant/acquire: make this owner hold the lock at least `holds` times. Safe to send twice.
--
-- KEYS[1]  lock     hash     owner -> hold count; its TTL is the lease
-- ARGV[1]  owner    string   "<client>:<task>"
-- ARGV[2]  lease    integer  milliseconds, at least 1
-- ARGV[3]  holds    integer  the count that this call leads to, at least 1
-- Parts    owner, claim, raises
-- Returns  1         acquired: the hold count is at least `holds`, the TTL at least `lease`; a record without a TTL keeps none
--          {0, ttl}  busy: milliseconds until the other owner's lease ends; -1: the record has no TTL
--          -2        LOST: `holds` is above 1, but this owner holds nothing
--          -3        WRONG_KIND: the hash at this name is not a record of this kind
local raised = raises(held, holds, 9)
if raised then redis.call('hset', lock, owner, holds) end
if ttl ~= -1 and ttl < tonumber(lease) then
    local set = redis.pcall('pexpire', lock, lease)
    if set ~= 1 then
        -- undo the write: a record without a TTL would never expire
        if not held then redis.call('del', lock) elseif raised then redis.call('hset', lock, owner, held) end
        return set
    end
end
return 1
