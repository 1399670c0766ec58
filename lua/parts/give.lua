-- parts/give: takes permits back from their owner. `in_line`: see parts/available. Returns the reply of permits/release, and how
-- many are available now that were held.
local leases, counter, last, holds, channel, total = KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if holds ~= '0' and holds ~= '1' then return redis.error_reply('ERR nestlock: holds must be 0 or 1') end

local owner, count = owner_of(last)
local now = server_time()
local function give(in_line)
    local permits, held = {}, 0
    each_permit(leases, owner, count, function(name, score)
        permits[#permits + 1] = name
        if score > now then held = held + 1 end
    end)
    if #permits == 0 then return nil, 0 end
    if holds == '1' then return held >= count and 0 or nil, 0 end

    local free = redis.call('get', counter)
    local told = in_line and available(#permits, #permits) or #permits
    if total == '0' and tonumber(free) then
        -- Redisson's waiters go on in order, as many as the message says, whatever each of them wants
        told = tonumber(free) + held + redis.call('zcount', leases, 0, now)
        told = told > 0 and available(told, #permits)
    end
    -- a server that accepts no writes refuses this, before any waiter is told. One without memory denies only a script's first
    -- write, and never ZREM: this lets later writes pass
    redis.call('zrem', leases, '')
    -- publish first: if PUBLISH is denied, nothing is written. No other client runs before this script ends
    if told then redis.call('publish', channel, told) end
    -- without a counter, the next acquire counts the permits
    if free then redis.call('incrby', counter, #permits) end
    for _, name in ipairs(permits) do redis.call('zrem', leases, name) end
    return held >= count and 1 or nil, held
end
