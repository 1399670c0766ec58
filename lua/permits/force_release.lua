-- permits/force_release: give back all permits, whatever their owners. Safe to send twice.
--
-- KEYS[1]  leases   zset     permit -> when it expires, in milliseconds of the server's clock
-- KEYS[2]  counter  string   how many permits are available, without those that have expired
-- ARGV[1]  channel  string   where waiters listen
-- ARGV[2]  total    integer  0: a semaphore, whose messages are the number available
-- Parts    counter
-- Returns  1        all are available now; waiters got their number as a message
--          0        none was taken
--          -3       WRONG_KIND: the key of the counter holds something else
local leases, channel, total = KEYS[1], ARGV[1], ARGV[2]

local taken = redis.call('zcard', leases)
if taken == 0 then return 0 end
-- see parts/give
local told = total == '0' and free and free + taken or taken
-- see parts/give
redis.call('zremrangebyscore', leases, 1, 0)
if told > 0 then redis.call('publish', channel, told) end
-- without a counter, the next acquire counts the permits
if free then redis.call('incrby', counter, taken) end
redis.call('zremrangebyscore', leases, '-inf', '+inf')
return 1
