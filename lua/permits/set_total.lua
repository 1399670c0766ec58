-- permits/set_total: change how many permits there are, taken ones included. Safe to send twice.
--
-- KEYS[1]  leases   zset     permit -> when it expires, in milliseconds of the server's clock
-- KEYS[2]  counter  string   how many permits are available, without those that have expired
-- ARGV[1]  total    integer  how many there are from now on, at least 1 and at most 10 digits
-- ARGV[2]  channel  string   where waiters listen
-- Parts    counter, time
-- Returns  list     {how many more may be acquired now}, 0 or more: an integer alone is at most 6; waiters got that as a message, if it changed
--          -3       WRONG_KIND: the key of the counter holds something else
local leases, total, channel = KEYS[1], ARGV[1], ARGV[2]
if not string.find(total, '^[1-9]%d*$') or #total > 10 then
    return redis.error_reply('ERR nestlock: total must be an integer of at least 1')
end

-- expired permits are still in the set: the client that removes them raises the counter
local wanted = tonumber(total) - redis.call('zcard', leases)
local expired = redis.call('zcount', leases, 0, server_time())
-- without a counter, waiters were told of none
local before = free and math.max(0, free + expired) or 0
local more = math.max(0, wanted + expired - before)
-- 0 wakes fair waiters: the first of them may want more than there are now, and no longer hold up the others
if more > 0 or free and wanted < free then redis.call('publish', channel, more) end
if not free then
    redis.call('set', counter, wanted)
elseif free ~= wanted then
    redis.call('incrby', counter, wanted - free)
end
return {more}
