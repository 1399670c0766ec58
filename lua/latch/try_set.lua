-- latch/try_set: say how many are to be counted down, unless that was said before. Safe to send twice.
--
-- KEYS[1]  request  string   the reply to this request, if it was executed before
-- KEYS[2]  counter  string   the count
-- KEYS[3]  callers  hash     those that have counted down once for all -> `1`
-- ARGV[1]  count    integer  how many, 1 to 10 digits
-- ARGV[2]  channel  string   where waiters listen
-- Parts    counter, once
-- Returns  list     {1}: done; Redisson's waiters got `1` as a message: wait for the next `0`. {0}: there is a count already
--          -3       WRONG_KIND: the key of the count holds something else
local callers, count, channel = KEYS[3], ARGV[1], ARGV[2]
if not string.find(count, '^[1-9]%d*$') or #count > 10 then
    return redis.error_reply('ERR nestlock: count must be an integer of at least 1')
end
if free then return once(0) end

may_write()
-- let the server refuse this command, if it does, before anything is written: this key does not exist
redis.call('del', request)
-- publish first: if PUBLISH is denied, nothing is written
redis.call('publish', channel, '1')
local reply = once(1)
redis.call('set', counter, count)
redis.call('del', callers)
return reply
