-- signal/acquire: make this owner hold the lock, if it is free or its own already. Safe to send twice.
--
-- KEYS[1]  lock     string   the owner; its TTL is the lease, in whole seconds
-- ARGV[1]  owner    string   any text that tells owners apart
-- ARGV[2]  lease    integer  milliseconds, rounded up to seconds; 0: the record gets no TTL
-- Returns  1         acquired: the record names this owner, the TTL is at least `lease`; a record without a TTL keeps none
--          {0, ttl}  busy: milliseconds until the other owner's lease ends; -1: the record has no TTL
local lock, owner, lease = KEYS[1], ARGV[1], ARGV[2]

local held = redis.call('get', lock)
if held and held ~= owner then return {0, redis.call('pttl', lock)} end

if lease ~= '0' and not string.find(lease, '^[1-9]%d*$') then
    return redis.error_reply('ERR nestlock: lease must be an integer of at least 0')
end
local seconds = math.ceil(tonumber(lease) / 1000)
if held then
    -- the request was sent again
    local ttl = redis.call('pttl', lock)
    if ttl ~= -1 and ttl < seconds * 1000 then redis.call('expire', lock, seconds) end
elseif seconds == 0 then
    redis.call('set', lock, owner)
else
    redis.call('set', lock, owner, 'ex', seconds)
end
return 1
