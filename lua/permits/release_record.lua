-- permits/release_record: release where a cluster has the counter on another node. Safe to send twice.
--
-- KEYS[1]  leases   zset     permit -> when it expires, in milliseconds of the server's clock
-- ARGV[1]  last     string   the owner's last permit: it must hold that many
-- ARGV[2]  holds    integer  0: give back all of them; 1: keep them
-- ARGV[3]  channel  string   where waiters listen
-- Parts    permit, time
-- Returns  1        given back: they have expired, and an acquire replaces them; waiters got their number as a message
--          0        still held
--          nil      this owner holds fewer
local leases, last, holds, channel = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
if holds ~= '0' and holds ~= '1' then return redis.error_reply('ERR nestlock: holds must be 0 or 1') end

local owner, count = owner_of(last)
local now, permits = server_time(), {}
each_permit(leases, owner, count, function(name, score)
    if score > now then permits[#permits + 1] = name end
end)
if #permits == 0 then return nil end
if holds == '1' then return #permits >= count and 0 or nil end

-- see parts/give
redis.call('zrem', leases, '')
redis.call('publish', channel, #permits)
for _, name in ipairs(permits) do redis.call('zadd', leases, 0, name) end
return #permits >= count and 1 or nil
