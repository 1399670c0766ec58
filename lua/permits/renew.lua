-- permits/renew: extend each owner's permits to at least `lease` from now, if they have not expired. Safe to send twice.
--
-- KEYS[n]     leases  zset     permit -> when it expires, in milliseconds of the server's clock
-- ARGV[2n-1]  owner   string   the owner that must hold permits of KEYS[n]
-- ARGV[2n]    lease   integer  milliseconds, at least 1
-- Parts       permit, renew_each, time
-- Returns     list   for each lock, in order:
--             1      renewed; a longer lease is unchanged
--             0      GONE: the owner has no permit, or it has expired
--             -1     TAKEN: the key holds something else
--             -2     UNKNOWN: the server refused this one; try again
--             error  the server's, if the only lock of the request is refused
local now = server_time()
return renew_each(function(leases, owner, lease)
    local renewed = each_permit(leases, owner, function(name, score)
        if score <= now then return false end
        -- out of memory, a server denies only a script's first write, and never ZREM: this lets later writes pass
        redis.call('zrem', leases, '')
        -- WAIT only waits for what this connection has written, so do not leave the score as it is
        return redis.call('zadd', leases, math.max(score + 1, now + tonumber(lease)), name)
    end)
    return renewed > 0 and 1 or 0
end)
