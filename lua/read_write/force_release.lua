-- read_write/force_release: end one side, whatever its owners; a writer's reading ends with it. Safe to send twice.
--
-- KEYS[1]  lock     hash     mode -> read or write, reader -> hold count, writer:write -> hold count; has a TTL
-- ARGV[1]  channel  string   where waiters listen
-- ARGV[2]  holds of string   the keys of all readers' holds: this, the reader, ":rwlock_timeout:" and a number
-- ARGV[3]  side     string   which side is to end: read or write
-- Parts    mode
-- Returns  1        free now; waiters were told
--          0        this side is free
--          -3       WRONG_KIND: the hash at this name is not a record of this kind
local channel, of, side = ARGV[1], ARGV[2], ARGV[3]

if mode ~= side then return 0 end

local fields = redis.call('hgetall', lock)
-- told first: where PUBLISH is refused, nothing is written
redis.call('publish', channel, '1')
redis.call('del', lock)
for at = 1, #fields, 2 do
    -- bounded: a damaged count must not keep the server busy
    for n = 1, math.min(tonumber(fields[at + 1]) or 0, 99999) do
        -- in a cluster it may be elsewhere, and is over by itself
        redis.pcall('del', of .. fields[at] .. ':rwlock_timeout:' .. n)
    end
end
return 1
