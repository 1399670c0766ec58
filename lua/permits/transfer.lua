-- permits/transfer: give the permits of one owner to another. Safe to send twice: the new owner's name is used only once.
--
-- KEYS[1]  leases   zset     permit -> when it expires, in milliseconds of the server's clock
-- ARGV[1]  from     string   the present owner
-- ARGV[2]  to       string   the next owner
-- ARGV[3]  lease    integer  milliseconds, at least 1: the lease from now on, even if that is shorter
-- Parts    moves, permit, time
-- Returns  1         `to` holds them; if it already did, nothing was written
--          -2        LOST: neither holds any
local leases, now, permits = lock, server_time(), {}
each_permit(leases, from, 1, function(name, score)
    if score > now then permits[#permits + 1] = name end
end)
if #permits == 0 then
    local theirs = redis.call('zscore', leases, to)
    return theirs and tonumber(theirs) > now and 1 or -2
end

-- let the server refuse this command, if it does, before anything is written
redis.call('zrem', leases, '')
for n, name in ipairs(permits) do
    redis.call('zadd', leases, now + tonumber(lease), permit(to, n))
    redis.call('zrem', leases, name)
end
return 1
