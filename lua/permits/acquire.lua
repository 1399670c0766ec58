-- permits/acquire: make this owner hold `count` permits. Safe to send twice.
--
-- KEYS[1]  leases   zset     permit -> when it expires, in milliseconds of the server's clock
-- KEYS[2]  counter  string   how many permits are available, without those that have expired
-- ARGV[1]  owner    string   "<client>:<task>"
-- ARGV[2]  lease    integer  milliseconds, at least 1
-- ARGV[3]  count    integer  how many permits, at least 1
-- ARGV[4]  total    integer  how many there are if there is no counter yet, at least `count`
-- ARGV[5]  channel  string   where waiters listen
-- Parts    permits, counter, time
-- Returns  1         acquired: each permit's lease is at least `lease`
--          {0, ttl}  busy: milliseconds until the next permit expires; -1: none does
--          -3        WRONG_KIND: the key of the counter holds something else
local leases, owner, lease, count, total, channel = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
if not (string.find(lease, '^[1-9]%d*$') and string.find(count, '^[1-9]%d*$') and string.find(total, '^[1-9]%d*$')) then
    return redis.error_reply('ERR nestlock: lease, count and total must be integers of at least 1')
end
local now = server_time()
local wanted, until_then = tonumber(count), now + tonumber(lease)
-- Lua's numbers skip integers above
if until_then > 9007199254740991 then
    return redis.error_reply('ERR nestlock: the lease is too long')
end

-- a request that is sent again
local held = each_permit(leases, owner, function(permit, score)
    -- WAIT only waits for what this connection has written, so do not leave the score as it is
    return score > now and redis.call('zadd', leases, math.max(score + 1, until_then), permit)
end)
if held > 0 then return 1 end

local expired = redis.call('zcount', leases, 0, now)
local left = (free or total - redis.call('zcard', leases)) + expired - wanted
if left < 0 then
    -- scores of Redisson without a lease are far above
    local next_end = redis.call('zrangebyscore', leases, '(' .. now, '(922337203685477', 'withscores', 'limit', 0, 1)[2]
    return {0, next_end and math.max(1, math.ceil(next_end - now)) or -1}
end

-- let the server refuse these commands, if it does, before anything is written
if expired > 0 then redis.call('zremrangebyscore', leases, 1, 0) end
if expired > wanted then redis.call('publish', channel, expired - wanted) end
if free then redis.call('incrby', counter, expired - wanted) else redis.call('set', counter, left) end
for n = 1, wanted do
    local added = redis.pcall('zadd', leases, until_then, n == 1 and owner or owner .. ' ' .. n)
    if type(added) ~= 'number' then
        -- the first one: undo the write
        if free then redis.call('incrby', counter, wanted - expired) else redis.call('del', counter) end
        return added
    end
end
if expired > 0 then redis.call('zremrangebyscore', leases, 0, now) end
return 1
