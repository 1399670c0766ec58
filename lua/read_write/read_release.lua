-- read_write/read_release: make this owner read-hold the lock `holds` times, fewer than now. Safe to send twice.
--
-- KEYS[1]  lock     hash     mode -> read or write, reader -> hold count, writer:write -> hold count; has a TTL
-- ARGV[1]  owner    string   "<client>:<task>"
-- ARGV[2]  holds    integer  the count that this call leads to; 0 ends this owner's reading
-- ARGV[3]  channel  string   where waiters listen
-- ARGV[4]  holds of string   the keys of all readers' holds: this, the reader, ":rwlock_timeout:" and a number
-- Returns  1        free now; all waiters were told
--          0        still held, by this owner at most `holds` times
--          nil      this owner does not hold it
local lock, owner, holds, channel, of = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4]

if holds ~= '0' and not string.find(holds, '^[1-9]%d*$') then
    return redis.error_reply('ERR nestlock: holds must be an integer of at least 0')
end

local mode, held = redis.call('hget', lock, 'mode'), redis.call('hget', lock, owner)
if not mode or not held then return nil end
local mine, given_up = of .. owner .. ':rwlock_timeout:', 0
-- bounded, here and below: a damaged count must not keep the server busy
for n = tonumber(holds) + 1, math.min(tonumber(held), 99999) do
    given_up = math.max(given_up, redis.call('pttl', mine .. n))
    redis.call('del', mine .. n)
end
if holds ~= '0' and tonumber(held) > tonumber(holds) then
    -- what is kept lives no shorter than what is given up. The DEL lets us write on a server that is out of memory
    redis.call('hset', lock, owner, holds)
    if redis.call('pttl', mine .. holds) < given_up then redis.call('set', mine .. holds, '1', 'PX', given_up) end
elseif holds == '0' then
    redis.call('hdel', lock, owner)
end
if mode == 'write' then return 0 end

-- as long as the longest hold that is left; readers whose holds are all over are gone
local longest, fields = 0, redis.call('hgetall', lock)
for at = 1, #fields, 2 do
    for n = 1, math.min(tonumber(fields[at + 1]) or 0, 99999) do
        longest = math.max(longest, redis.call('pttl', of .. fields[at] .. ':rwlock_timeout:' .. n))
    end
end
if longest > 0 then
    redis.call('pexpire', lock, longest)
    return 0
end
redis.call('publish', channel, '1')
redis.call('del', lock)
return 1
