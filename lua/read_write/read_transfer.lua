-- read_write/read_transfer: give the read hold of one owner to another. Safe to send twice: the new owner's name is used only once.
--
-- KEYS[1]  lock     hash     mode -> read or write, reader -> hold count, writer:write -> hold count; has a TTL
-- ARGV[1]  from     string   who reads
-- ARGV[2]  to       string   who reads then, once
-- ARGV[3]  lease    integer  milliseconds, at least 1: how long it reads, also where that is less
-- ARGV[4]  holds of string   the keys of all readers' holds: this, the reader, ":rwlock_timeout:" and a number
-- Parts    moves, life
-- Returns  1         `to` reads; if it did so before, nothing was written
--          -2        LOST: neither reads, or for longer than its hold lasts
local of = ARGV[4]

local mode, held = redis.call('hget', lock, 'mode'), redis.call('hget', lock, from)
if not held or mode ~= 'read' and mode ~= 'write' then
    return mode == 'read' and redis.call('hexists', lock, to) == 1 and 1 or -2
end
if mode == 'write' then
    return redis.error_reply('ERR nestlock: who reads inside its own writing cannot hand that over')
end

-- until when the others read, as far as a look at a few tells: of more readers the TTL is left as it is
local ttl, least, holds = redis.call('pttl', lock), tonumber(lease), math.min(tonumber(held) or 0, 99999)
local longest, fields = least, redis.call('hlen', lock) <= 33 and redis.call('hgetall', lock) or {}
if life(of, from, 1, holds) == -2 then return -2 end
for at = 1, #fields, 2 do
    local reader, count = fields[at], tonumber(fields[at + 1])
    if reader ~= from and reader ~= 'mode' then longest = math.max(longest, life(of, reader, 1, count or 0)) end
end
local wanted = (#fields > 0 or ttl < longest) and longest or ttl
-- a write that needs no memory lets the next ones pass on a server that is out of memory
redis.call('hdel', lock, '')
redis.call('set', of .. to .. ':rwlock_timeout:1', '1', 'PX', lease)
local done, refused = pcall(function()
    redis.call('hset', lock, to, '1')
    if ttl ~= -1 and ttl ~= wanted then redis.call('pexpire', lock, wanted) end
end)
if not done then
    -- what is refused has moved nothing
    redis.call('hdel', lock, to)
    redis.pcall('del', of .. to .. ':rwlock_timeout:1')
    return redis.error_reply(refused.err or refused)
end
redis.call('hdel', lock, from)
for n = 1, holds do redis.pcall('del', of .. from .. ':rwlock_timeout:' .. n) end
return 1
