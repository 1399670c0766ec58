-- permits/available: how many permits may be acquired. Read-only.
--
-- KEYS[1]  leases   zset     permit -> when it expires, in milliseconds of the server's clock
-- KEYS[2]  counter  string   how many permits are available, without those that have expired
-- ARGV[1]  total    integer  how many there are if there is no counter yet, at most 10 digits. 0: none until there is one
-- Parts    counter, time
-- Returns  list     {how many}, 0 or more: an integer alone is at most 6
--          -3       WRONG_KIND: the key of the counter holds something else
local leases, total = KEYS[1], ARGV[1]
if not (string.find(total, '^[1-9]%d*$') or total == '0') or #total > 10 then
    return redis.error_reply('ERR nestlock: total must be an integer of at least 0')
end
if not free and total == '0' then return {0} end
local expired = redis.call('zcount', leases, 0, server_time())
return {math.max(0, (free or total - redis.call('zcard', leases)) + expired)}
