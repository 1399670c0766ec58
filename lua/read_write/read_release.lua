-- read_write/read_release: make this owner read-hold the lock `holds` times, fewer than now. Safe to send twice.
--
-- KEYS[1]  lock     hash     mode -> read or write, reader -> hold count, writer:write -> hold count; has a TTL
-- KEYS[2]  readers  zset     waiting reader -> 0: goes before the next writer; 1: before the writer after that
-- ARGV[1]  owner    string   "<client>:<task>"
-- ARGV[2]  holds    string   the count that this call leads to; 0 ends this owner's read holds, and its waiting
--                            n>m: the same as m, if the record says n holds
-- ARGV[3]  channel  string   where waiters listen
-- ARGV[4]  holds of string   prefix of every read hold's key: prefix, reader, ":rwlock_timeout:", number
-- Parts    fewer, life, leave
-- Returns  1        free now; all waiters were notified
--          0        still held, by this owner at most `holds` times
--          nil      this owner does not hold it
--          list     CHANGED: {0, holds}: the record does not say n of n>m; nothing was written
local lock, readers, owner, channel, of = KEYS[1], KEYS[2], ARGV[1], ARGV[3], ARGV[4]
holds = tonumber(holds)

local mode, held = redis.call('hget', lock, 'mode'), tonumber(redis.call('hget', lock, owner))
if mode ~= 'read' and mode ~= 'write' or not held then
    if holds == 0 and not held and redis.call('zscore', readers, owner) then
        -- a writer may have yielded to this reader
        if not mode then redis.call('publish', channel, '1') end
        leave(readers, owner)
    end
    return nil
end
if only and held ~= tonumber(only) then return {0, held} end

-- runs after the decisive write: a key that the server refuses to delete expires by itself
local function forget_holds()
    for n = holds + 1, math.min(held, 99999) do redis.pcall('del', of .. owner .. ':rwlock_timeout:' .. n) end
end

if holds > 0 then
    if held <= holds then return 0 end
    local given_up, kept = life(of, owner, holds + 1, held), life(of, owner, holds, holds)
    -- out of memory, a server denies only a script's first write, and never HDEL: this lets later writes pass
    redis.call('hdel', lock, '')
    redis.call('hset', lock, owner, holds)
    -- the holds kept must live at least as long as those released
    if given_up > 0 and kept < given_up then
        local set = redis.pcall('set', of .. owner .. ':rwlock_timeout:' .. holds, '1', 'PX', given_up)
        if set.err then redis.call('hset', lock, owner, held) return set end
    end
    forget_holds()
    return 0
end

-- the longest read hold of the others, the dead readers (all holds expired), and the TTL that follows
local longest, dead, wanted, fields = 0, {}, nil, redis.call('hlen', lock)
if mode == 'read' and fields > 2 then
    local function look(at)
        for n = 1, #at, 2 do
            local reader, count = at[n], tonumber(at[n + 1])
            if reader ~= owner and count and count >= 1 then
                local left = life(of, reader, 1, count)
                longest = math.max(longest, left)
                -- at most 100 per call: there may be many
                if left == -2 and #dead < 100 and not string.find(reader, ':write', 1, true) then dead[#dead + 1] = reader end
            end
        end
    end
    -- of many readers, a random sample is enough: it shows that one still reads, for at least half of the TTL if this
    -- owner held for that long. The TTL then stays, or grows
    local ttl, some = redis.call('pttl', lock), fields > 18 and redis.pcall('hrandfield', lock, 8, 'WITHVALUES')
    if some and not some.err then look(some) end
    if longest == 0 or 2 * longest < ttl and 2 * life(of, owner, 1, held) >= ttl then
        look(redis.call('hgetall', lock))
        wanted = longest ~= ttl and longest
    else
        wanted = longest > ttl and ttl ~= -1 and longest
    end
end

if mode == 'read' and longest == 0 then
    redis.call('publish', channel, '1')
    redis.call('del', lock)
    forget_holds()
    return 1
end
redis.call('hdel', lock, owner, unpack(dead))
forget_holds()
if wanted then redis.pcall('pexpire', lock, wanted) end
return 0
