-- semaphore/try_set: say how many permits there are, unless that was said before. Safe to send twice.
--
-- KEYS[1]  request  string   the reply to this request, if it was executed before
-- KEYS[2]  counter  string   how many permits are available, without those that have expired
-- KEYS[3]  leases   zset     permit -> when it expires, in milliseconds of the server's clock
-- ARGV[1]  total    integer  how many there are, 0 to 10 digits
-- ARGV[2]  channel  string   where waiters listen
-- Parts    counter, once, time
-- Returns  list     {1}: done, those that are still taken included; waiters got the number available as a message. {0}: there
--                   is a number already
--          -3       WRONG_KIND: the key of the counter holds something else
local leases, total, channel = KEYS[3], ARGV[1], ARGV[2]
if not (string.find(total, '^[1-9]%d*$') or total == '0') or #total > 10 then
    return redis.error_reply('ERR nestlock: total must be an integer of at least 0')
end
if free then return once(0) end

-- the number was deleted while permits were taken: they come back later
local more = tonumber(total) - redis.call('zcard', leases)
local available = more + redis.call('zcount', leases, 0, server_time())
may_write()
-- publish first: if PUBLISH is denied, nothing is written
if available > 0 then redis.call('publish', channel, available) end
local reply = once(1)
redis.call('set', counter, more)
return reply
