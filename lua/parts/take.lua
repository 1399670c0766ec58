-- parts/take: makes an owner hold permits, if more than `ahead` are available. `in_line`: see parts/available. Returns the reply of
-- permits/acquire; once acquired, also how many are available now.
local leases, owner, lease, count, total, channel = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
-- other clients wait while a script runs, so there is a limit to the number of permits
local fit = string.find(lease, '^[1-9]%d*$') and string.find(count, '^[1-9]%d?%d?$')
if not fit or not (string.find(total, '^[1-9]%d*$') or total == '0') or #total > 10 then
    return redis.error_reply('ERR nestlock: lease must be an integer of at least 1, total of at least 0, count of 1 to 999')
end
local now = server_time()
local wanted, until_then = tonumber(count), now + tonumber(lease)
-- Lua's numbers skip integers above
if until_then > 9007199254740991 then
    return redis.error_reply('ERR nestlock: the lease is too long')
end

local function take(ahead, in_line)
    -- the owner has some already if the request is sent again, or if another program gave back one of several
    local names, spare, missing, stale = {}, {}, 0, 0
    for n = 1, wanted + 1 do names[n] = permit(owner, n) end
    local scores = redis.call('zmscore', leases, unpack(names))
    for n = 1, wanted + 1 do scores[n] = scores[n] and tonumber(scores[n]) end
    for n = 1, wanted do
        if not scores[n] then missing = missing + 1 elseif scores[n] <= now then stale = stale + 1 end
    end
    local score = scores[wanted + 1]
    while score do
        if score <= now then stale = stale + 1 end
        spare[#spare + 1] = permit(owner, wanted + #spare + 1)
        score = tonumber(redis.call('zscore', leases, permit(owner, wanted + #spare + 1)))
    end

    -- permits that have expired count as taken until an acquire needs them
    local left, expired = (free or total - redis.call('zcard', leases)) + #spare - missing, 0
    -- of a semaphore, Redisson does not take what has expired, so each acquire does
    if missing + stale > 0 and (left < ahead or total == '0' and free) then
        -- this owner's are replaced
        expired = redis.call('zcount', leases, 0, now) - stale
        left = left + expired
    end
    if missing + stale > 0 and left < ahead then
        -- scores of Redisson without a lease are far above
        local next_end = redis.call('zrangebyscore', leases, '(' .. now, '(922337203685477', 'withscores', 'limit', 0, 1)[2]
        return {0, next_end and math.max(1, math.ceil(next_end - now)) or -1}
    end

    local ttl, change = free and redis.call('pttl', counter) or -1, expired + #spare - missing
    -- let the server refuse these commands, if it does, before anything is written
    if expired > 0 then redis.call('zremrangebyscore', leases, 1, 0) end
    if #spare > 0 then redis.call('zrem', leases, '') end
    local more = free and change or left
    -- of a semaphore, all that are available: see parts/give
    local told = free and total == '0' and left or more
    if more > 0 and told > 0 then
        redis.call('publish', channel, (total == '0' or in_line) and available(told, more) or told)
    end
    if free then redis.call('incrby', counter, change) elseif total ~= '0' then redis.call('set', counter, left) end
    local leased = {}
    for n = 1, wanted do
        -- WAIT only waits for what this connection has written, so leave no score as it is
        leased[2 * n - 1] = scores[n] and math.max(scores[n] + 1, until_then) or until_then
        leased[2 * n] = names[n]
    end
    local added = redis.pcall('zadd', leases, unpack(leased))
    if type(added) ~= 'number' then
        -- undo the write
        if free then redis.call('incrby', counter, 0 - change) else redis.call('del', counter) end
        return added
    end
    for _, extra in ipairs(spare) do redis.call('zrem', leases, extra) end
    if expired > 0 then redis.call('zremrangebyscore', leases, 0, now) end
    -- as Redisson does: if the counter expires, so do its permits. It knows of no permits of a semaphore
    if ttl > 0 and total ~= '0' then redis.pcall('pexpire', leases, ttl) end
    return 1, left
end
