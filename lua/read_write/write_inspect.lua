-- read_write/write_inspect: the writer, its hold count and the TTL. Read-only.
--
-- KEYS[1]  lock     hash     mode -> read or write, reader -> hold count, writer:write -> hold count; has a TTL
-- Parts    mode
-- Returns  nil      no writer holds the lock
--          list     {TTL in milliseconds or -1, owner, hold count}
--          -3       WRONG_KIND: the hash at this name is not a record of this kind
if mode ~= 'write' then return nil end

for _, field in ipairs(redis.call('hkeys', lock)) do
    local owner = string.match(field, '^(.*):write$')
    if owner then return {redis.call('pttl', lock), owner, tonumber(redis.call('hget', lock, field))} end
end
return -3
