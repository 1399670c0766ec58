-- semaphore/add: make more permits available, or fewer. Safe to send twice.
--
-- KEYS[1]  request  string   the reply to this request, if it was executed before
-- KEYS[2]  counter  string   how many permits are available, without those that have expired
-- KEYS[3]  leases   zset     permit -> when it expires, in milliseconds of the server's clock
-- ARGV[1]  count    integer  how many more, below 0: fewer; at most 10 digits
-- ARGV[2]  channel  string   where waiters listen
-- Parts    counter, once, time
-- Returns  list     {1}: done; if there are more, waiters got the number available as a message. {0}: there would be more than
--                   2147483647, or fewer than the same number below 0
--          -3       WRONG_KIND: the key of the counter holds something else
local leases, count, channel = KEYS[3], ARGV[1], ARGV[2]
if not string.find(count, '^%-?[1-9]%d*$') or #count > 11 then
    return redis.error_reply('ERR nestlock: count must be an integer other than 0')
end
local now_free = (free or 0) + tonumber(count)
if math.abs(now_free) > 2147483647 then return once(0) end

-- those that have expired are available, too
local available = now_free + redis.call('zcount', leases, 0, server_time())
may_write()
-- publish first: if PUBLISH is denied, nothing is written
if tonumber(count) > 0 and available > 0 then redis.call('publish', channel, available) end
local reply = once(1)
redis.call('set', counter, now_free, 'keepttl')
return reply
