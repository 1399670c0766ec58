-- parts/claim: the hold count, `held`, of an owner that acquires; returns early if it cannot acquire. Needs parts/owner.
local lock, owner, lease, holds = KEYS[1], ARGV[1], ARGV[2], ARGV[3]

local ttl, held = redis.call('pttl', lock), nil
if ttl ~= -2 then
    -- a record of this kind has exactly one field
    local record = redis.call('hlen', lock) == 1 and redis.call('hgetall', lock) or {''}
    if not is_owner(record[1]) then return -3 end
    if record[1] == owner then
        held = record[2]
    elseif holds == '1' then
        return {0, ttl}
    end
end

if not string.find(lease, '^[1-9]%d*$') or holds ~= '1' and not string.find(holds, '^[1-9]%d*$') then
    return redis.error_reply('ERR nestlock: lease and holds must be integers of at least 1')
end
if not held and holds ~= '1' then return -2 end
