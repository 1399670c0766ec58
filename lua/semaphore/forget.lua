-- semaphore/forget: the permits of this owner stay taken, and belong to no owner. Safe to send twice.
--
-- KEYS[1]  request  string   the reply to this request, if it was executed before
-- KEYS[2]  leases   zset     permit -> when it expires, in milliseconds of the server's clock
-- ARGV[1]  last     string   the owner's last permit: it must hold that many
-- Parts    permit, once, time
-- Returns  list     {1}: done. {0}: the owner has fewer, or they have expired; nothing was changed
local leases, last = KEYS[2], ARGV[1]
local owner, count = owner_of(last)
local now, permits = server_time(), {}
each_permit(leases, owner, count, function(name, score)
    if score > now then permits[#permits + 1] = name end
end)
if #permits < count then return once(0) end

-- let the server refuse this command, if it does, before anything is written
redis.call('zrem', leases, '')
local reply = once(1)
for _, name in ipairs(permits) do redis.call('zrem', leases, name) end
return reply
