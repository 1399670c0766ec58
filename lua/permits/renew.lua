-- permits/renew: extend each owner's permits to at least `lease` from now, if they have not expired. Safe to send twice.
--
-- KEYS[n]     leases  zset     permit -> when it expires, in milliseconds of the server's clock
-- ARGV[2n-1]  last    string   the owner's last permit of KEYS[n]: it must hold that many
-- ARGV[2n]    lease   integer  milliseconds, at least 1
-- Parts       permit, renew_each, time
-- Returns     list   for each lock, in order:
--             1      renewed; a longer lease is unchanged
--             0      GONE: the owner has fewer, or they have expired; nothing was written
--             -1     TAKEN: the key holds something else
--             -2     UNKNOWN: the server refused this one; try again
--             error  the server's, if the only lock of the request is refused
local now = server_time()
return renew_each(function(leases, last, lease)
    local owner, count = owner_of(last)
    local taken, renewed, until_then = 0, {}, now + tonumber(lease)
    each_permit(leases, owner, count, function(name, score)
        if score <= now then return end
        taken = taken + 1
        -- WAIT only waits for what this connection has written, so do not leave the score as it is
        renewed[2 * taken - 1], renewed[2 * taken] = math.max(score + 1, until_then), name
    end)
    if taken < count then return 0 end
    -- out of memory, a server denies only a script's first write, and never ZREM: this lets later writes pass
    redis.call('zrem', leases, '')
    for n = 1, 2 * taken, 200 do redis.call('zadd', leases, unpack(renewed, n, math.min(n + 199, 2 * taken))) end
    return 1
end)
