-- read_write/read_transfer: give the read hold of one owner to another. Safe to send twice: the new owner's name is used only once.
--
-- KEYS[1]  lock     hash     mode -> read or write, reader -> hold count, writer:write -> hold count; has a TTL
-- ARGV[1]  from     string   the present reader
-- ARGV[2]  to       string   the next reader, with a hold count of 1
-- ARGV[3]  lease    integer  milliseconds, at least 1: the hold's TTL from now on, even if that is shorter
-- ARGV[4]  holds of string   prefix of every read hold's key: prefix, reader, ":rwlock_timeout:", number
-- Parts    moves, life
-- Returns  1         `to` holds it; if it already did, nothing was written
--          -2        LOST: neither holds it, or the holds of `from` have expired
local of = ARGV[4]

local mode, held = redis.call('hget', lock, 'mode'), redis.call('hget', lock, from)
if not held or mode ~= 'read' and mode ~= 'write' then
    return mode == 'read' and redis.call('hexists', lock, to) == 1 and 1 or -2
end
if mode == 'write' then
    return redis.error_reply('ERR nestlock: who reads inside its own writing cannot hand that over')
end

-- the longest hold of the others, if there are at most 32; with more readers the TTL is never shortened
local ttl, least, holds = redis.call('pttl', lock), tonumber(lease), math.min(tonumber(held) or 0, 99999)
local longest, fields = least, redis.call('hlen', lock) <= 33 and redis.call('hgetall', lock) or {}
if life(of, from, 1, holds) == -2 then return -2 end
for at = 1, #fields, 2 do
    local reader, count = fields[at], tonumber(fields[at + 1])
    if reader ~= from and reader ~= 'mode' then longest = math.max(longest, life(of, reader, 1, count or 0)) end
end
local wanted = (#fields > 0 or ttl < longest) and longest or ttl
-- out of memory, a server denies only a script's first write, and never HDEL: this lets later writes pass
redis.call('hdel', lock, '')
redis.call('set', of .. to .. ':rwlock_timeout:1', '1', 'PX', lease)
local done, refused = pcall(function()
    redis.call('hset', lock, to, '1')
    if ttl ~= -1 and ttl ~= wanted then redis.call('pexpire', lock, wanted) end
end)
if not done then
    -- a refused transfer must leave the hold where it was
    redis.call('hdel', lock, to)
    redis.pcall('del', of .. to .. ':rwlock_timeout:1')
    return redis.error_reply(refused.err or refused)
end
redis.call('hdel', lock, from)
for n = 1, holds do redis.pcall('del', of .. from .. ':rwlock_timeout:' .. n) end
return 1
