-- latch/count_down: count one down. Safe to send twice.
--
-- KEYS[1]  request  string   the reply to this request, if it was executed before
-- KEYS[2]  counter  string   the count
-- KEYS[3]  callers  hash     those that have counted down once for all -> `1`
-- ARGV[1]  caller   string   counts once for all; empty: each request counts
-- ARGV[2]  channel  string   where waiters listen
-- Parts    counter, once
-- Returns  list     {the count that is left}; at 0 the waiters got `0` as a message, and the latch is deleted
--          -3       WRONG_KIND: the key of the count holds something else
local callers, caller, channel = KEYS[3], ARGV[1], ARGV[2]
if not free or free <= 0 then return once(0) end
local is_known = caller ~= '' and redis.call('hmget', callers, caller)[1]
if is_known then return once(free) end
local left = free - 1

may_write()
-- let the server refuse this command, if it does, before anything is written: this key does not exist
redis.call('del', request)
-- publish first: if PUBLISH is denied, nothing is written
if left == 0 then redis.call('publish', channel, '0') end
redis.call('set', counter, free, 'keepttl')
-- at zero they are deleted
if caller ~= '' and left > 0 then redis.call('hset', callers, caller, '1') end
local reply = once(left)
if left == 0 then redis.call('del', counter, callers) else redis.call('set', counter, left, 'keepttl') end
return reply
