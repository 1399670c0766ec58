-- permits/release: give back this owner's permits. Safe to send twice.
--
-- KEYS[1]  leases   zset     permit -> when it expires, in milliseconds of the server's clock
-- KEYS[2]  counter  string   how many permits are available, without those that have expired
-- ARGV[1]  last     string   the owner's last permit: it must hold that many
-- ARGV[2]  holds    integer  0: give back all of them; 1: keep them
-- ARGV[3]  channel  string   where waiters listen
-- ARGV[4]  total    integer  0: a semaphore, whose messages are the number available
-- Parts    permit, available, time
-- Returns  1        given back; waiters got the number of permits as a message
--          0        still held
--          nil      this owner holds fewer. Those that it had, or that had expired, were given back
local leases, counter, last, holds, channel, total = KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if holds ~= '0' and holds ~= '1' then return redis.error_reply('ERR nestlock: holds must be 0 or 1') end

local owner, count = owner_of(last)
local now, permits, held = server_time(), {}, 0
each_permit(leases, owner, count, function(name, score)
    permits[#permits + 1] = name
    if score > now then held = held + 1 end
end)
if #permits == 0 then return nil end
if holds == '1' then return held >= count and 0 or nil end

local free = redis.call('get', counter)
local told = #permits
if total == '0' and tonumber(free) then
    -- Redisson's waiters go on in order, as many as the message says, whatever each of them wants
    told = tonumber(free) + held + redis.call('zcount', leases, 0, now)
    told = told > 0 and available(told, #permits)
end
-- publish first: if PUBLISH is denied, nothing is written. No other client runs before this script ends
if told then redis.call('publish', channel, told) end
-- out of memory, a server denies only a script's first write, and never ZREM: this lets later writes pass
redis.call('zrem', leases, '')
-- without a counter, the next acquire counts the permits
if free then redis.call('incrby', counter, #permits) end
for _, name in ipairs(permits) do redis.call('zrem', leases, name) end
return held >= count and 1 or nil
