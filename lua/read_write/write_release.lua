-- read_write/write_release: make this owner write-hold the lock `holds` times, fewer than now. Safe to send twice.
--
-- KEYS[1]  lock     hash     mode -> read or write, reader -> hold count, writer:write -> hold count; has a TTL
-- KEYS[2]  intent   string   exists while a writer waits for readers: the last writer that announced it
-- ARGV[1]  owner    string   "<client>:<task>"
-- ARGV[2]  holds    string   the count that this call leads to; 0 ends this owner's write holds, and its waiting
--                            n>m: the same as m, if the record says n holds
-- ARGV[3]  channel  string   where waiters listen
-- ARGV[4]  holds of string   prefix of every read hold's key: prefix, reader, ":rwlock_timeout:", number
-- Parts    fewer, life
-- Returns  1        no writer any more, though this owner may still read; all waiters were notified
--          0        still held, at most `holds` times; the TTL is unchanged
--          nil      this owner does not hold it
--          list     CHANGED: {0, holds}: the record does not say n of n>m; nothing was written
local lock, intent, owner, channel, of = KEYS[1], KEYS[2], ARGV[1], ARGV[3], ARGV[4]

local held = redis.call('hget', lock, owner .. ':write')
if not held then
    if holds == '0' and redis.call('get', intent) == owner then
        redis.call('publish', channel, '1')
        redis.call('del', intent)
    end
    return nil
end
if only and held ~= only then return {0, tonumber(held)} end
if holds ~= '0' then
    if tonumber(held) > tonumber(holds) then
        -- out of memory, a server denies only a script's first write, and never HDEL: this lets later writes pass
        redis.call('hdel', lock, '')
        redis.call('hset', lock, owner .. ':write', holds)
    end
    return 0
end

-- a downgraded writer reads for as long as its read holds live, however long its write lease was
local longest = life(of, owner, 1, tonumber(redis.call('hget', lock, owner)) or 0)
-- publish first: if PUBLISH is denied, nothing is written. No other client runs before this script ends
redis.call('publish', channel, '1')
if longest > 0 then
    -- HDEL first, as above. If PEXPIRE is refused, the TTL is merely longer than needed
    redis.call('hdel', lock, '')
    redis.call('hset', lock, 'mode', 'read')
    redis.call('hdel', lock, owner .. ':write')
    redis.pcall('pexpire', lock, longest)
else
    redis.call('del', lock)
end
return 1
