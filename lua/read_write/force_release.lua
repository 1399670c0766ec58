-- read_write/force_release: end one side, whatever its owners; a writer's own read holds end with it. Safe to send twice.
--
-- KEYS[1]  lock     hash     mode -> read or write, reader -> hold count, writer:write -> hold count; has a TTL
-- ARGV[1]  channel  string   where waiters listen
-- ARGV[2]  holds of string   prefix of every read hold's key: prefix, reader, ":rwlock_timeout:", number
-- ARGV[3]  side     string   the side to end: read or write
-- Parts    mode
-- Returns  1        free now; waiters were notified
--          0        this side was free
--          -3       WRONG_KIND: the hash at this name is not a record of this kind
local channel, of, side = ARGV[1], ARGV[2], ARGV[3]

if mode ~= side then return 0 end

local fields = redis.call('hgetall', lock)
-- publish first: if PUBLISH is denied, nothing is written
redis.call('publish', channel, '1')
redis.call('del', lock)
for at = 1, #fields, 2 do
    -- capped: a corrupt count must not block the server
    for n = 1, math.min(tonumber(fields[at + 1]) or 0, 99999) do
        -- in a cluster, the key may be on another node; it expires by itself
        redis.pcall('del', of .. fields[at] .. ':rwlock_timeout:' .. n)
    end
end
return 1
