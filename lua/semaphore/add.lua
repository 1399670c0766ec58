-- semaphore/add: make more permits available, or fewer. Safe to send twice.
--
-- KEYS[1]  request  string   the reply to this request, if it was executed before
-- KEYS[2]  counter  string   how many permits are available, without those that have expired
-- ARGV[1]  count    integer  how many more, below 0: fewer; at most 10 digits
-- ARGV[2]  channel  string   where waiters listen
-- Parts    counter, once
-- Returns  list     {1}: done; if there are more, waiters got the number available as a message. {0}: there would be more than
--                   2147483647, or fewer than the same number below 0
--          -3       WRONG_KIND: the key of the counter holds something else
local count, channel = ARGV[1], ARGV[2]
if not string.find(count, '^%-?[1-9]%d*$') or #count > 11 then
    return redis.error_reply('ERR nestlock: count must be an integer other than 0')
end
local now_free = (free or 0) + tonumber(count)
if math.abs(now_free) > 2147483647 then return {0} end

-- publish first: if PUBLISH is denied, nothing is written
if tonumber(count) > 0 and now_free > 0 then redis.call('publish', channel, now_free) end
local reply = once(1)
redis.call('set', counter, now_free, 'keepttl')
return reply
