-- parts/claim: what an owner that acquires has of the lock, `held`; answers what forbids to acquire. Needs parts/owner.
local lock, owner, lease, holds = KEYS[1], ARGV[1], ARGV[2], ARGV[3]

local fields, held = redis.call('hlen', lock), nil
-- a record of this kind has exactly one field
if fields > 1 then return -3 end
if fields == 1 then
    local record = redis.call('hgetall', lock)
    if not string.find(record[1], OWNER) then return -3 end
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
