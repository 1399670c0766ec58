-- read_write/read_renew: extend locks and their owners' holds to at least `lease` from now. Safe to send twice.
--
-- KEYS[n]     lock   hash     mode -> read or write, reader -> hold count, writer:write -> hold count; has a TTL
-- ARGV[2n-1]  owner  string   the owner that must hold KEYS[n]
-- ARGV[2n]    lease  integer  milliseconds, at least 1
-- Parts       renew_each
-- Returns     list   for each lock, in order:
--             1      renewed; a longer TTL is unchanged, and the record's is at least that of the longest hold
--             0      GONE: no such record
--             -1     TAKEN: the record exists, but this owner does not read, or was wiped after its holds expired
--             -2     UNKNOWN: the server refused this one; try again
--             error  the server's, if the only lock of the request is refused
return renew_each(function(lock, owner, lease)
    local least = tonumber(lease)
    local mode = redis.call('hget', lock, 'mode')
    local held = (mode == 'read' or mode == 'write') and tonumber(redis.call('hget', lock, owner))
    -- a writer's field is not a read hold
    if not held or string.find(owner, ':write$') then return redis.call('exists', lock) == 1 and -1 or 0 end
    local mine = (string.find(lock, '{', 1, true) and lock or '{' .. lock .. '}') .. ':' .. owner .. ':rwlock_timeout:'
    local longest, short = -2, {}
    -- capped: a corrupt count must not block the server
    for n = 1, math.min(held, 99999) do
        local ttl = redis.call('pttl', mine .. n)
        longest = math.max(longest, ttl)
        if ttl >= 0 and ttl < least then short[#short + 1] = mine .. n end
    end
    local ttl = redis.call('pttl', lock)
    if longest == -2 then
        -- all holds have expired but are not wiped yet: their owner was never notified of a loss. Out of memory, a
        -- server denies only a script's first write, and never HDEL: this lets later writes pass
        redis.call('hdel', lock, '')
        redis.call('set', mine .. '1', '1', 'PX', lease)
    end
    -- Redisson may have set this TTL to its own watchdog timeout, even if our holds live longer
    local wanted = math.max(longest, least)
    local set = ttl < 0 and 1 or redis.pcall('pexpire', lock, math.max(ttl, wanted))
    if set ~= 1 then
        if longest == -2 then redis.pcall('del', mine .. '1') end
        error(set, 0)
    end
    for _, hold in ipairs(short) do redis.call('pexpire', hold, lease) end
    return 1
end)
