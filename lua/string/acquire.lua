-- string/acquire: make this owner hold the lock. Safe to send twice.
--
-- KEYS[1]  lock     string   the owner; its TTL is the lease
-- ARGV[1]  owner    string   "<client>:<task>", or a value of the user's choice
-- ARGV[2]  lease    integer  milliseconds, at least 1
-- Returns  1         acquired: the TTL is at least `lease`; a record without a TTL keeps none
--          {0, ttl}  busy: milliseconds until the other owner's lease ends; -1: the record has no TTL
local lock, owner, lease = KEYS[1], ARGV[1], ARGV[2]

local holder = redis.call('get', lock)
if holder and holder ~= owner then return {0, redis.call('pttl', lock)} end

if not string.find(lease, '^[1-9]%d*$') then
    return redis.error_reply('ERR nestlock: lease must be an integer of at least 1')
end
if not holder then
    redis.call('set', lock, owner, 'PX', lease)
    return 1
end
local ttl = redis.call('pttl', lock)
if ttl ~= -1 and ttl < tonumber(lease) then redis.call('pexpire', lock, lease) end
return 1
