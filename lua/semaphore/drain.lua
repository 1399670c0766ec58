-- semaphore/drain: take away all permits that are available. Safe to send twice.
--
-- KEYS[1]  request  string   the reply to this request, if it was executed before
-- KEYS[2]  counter  string   how many permits are available, without those that have expired
-- KEYS[3]  leases   zset     permit -> when it expires, in milliseconds of the server's clock
-- Parts    counter, once, time
-- Returns  list     {how many there were}, 0 or more: an integer alone is at most 6
--          -3       WRONG_KIND: the key of the counter holds something else
local leases, now = KEYS[3], server_time()
-- permits that have expired are available, too
local expired = free and redis.call('zcount', leases, 0, now) or 0
local there = (free or 0) + expired
if there <= 0 then return once(0) end

-- let the server refuse this command, if it does, before anything is written
if expired > 0 then redis.call('zremrangebyscore', leases, 1, 0) end
local reply = once(there)
if expired > 0 then redis.call('zremrangebyscore', leases, 0, now) end
redis.call('set', counter, 0, 'keepttl')
return reply
