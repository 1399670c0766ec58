-- fenced/set: write a value, unless the fence has seen a higher token. Safe to send twice.
--
-- KEYS[1]  data     string   the guarded value
-- KEYS[2]  fence    string   the highest token seen, an integer without a TTL
-- ARGV[1]  token    integer  the writer's token, 1 to 2^53 - 1
-- ARGV[2]  value    string   what to write
-- Returns  1          written
--          {0, seen}  STALE: the highest token seen, which is above the writer's
local data, fence, token, value = KEYS[1], KEYS[2], ARGV[1], ARGV[2]

if not string.find(token, '^[1-9]%d*$') or tonumber(token) > 9007199254740991 then
    return redis.error_reply('ERR nestlock: a token is an integer from 1 to 2^53 - 1')
end
local seen = redis.call('get', fence)
-- locks have TTLs, guarded values have none
if not seen and redis.call('pttl', data) >= 0 then
    return redis.error_reply('ERR nestlock: this key has a TTL: perhaps a lock is kept there; PERSIST it to guard it')
end
seen = seen or '0'
if not string.find(seen, '^%d+$') or tonumber(seen) > 9007199254740991 then
    return redis.error_reply('ERR nestlock: the fence beside this key holds no token')
end
-- MSET would overwrite a key of any type: STRLEN fails with WRONGTYPE first
redis.call('strlen', data)

if tonumber(seen) > tonumber(token) then return {0, tonumber(seen)} end
-- one command, so that the server cannot refuse one of the two writes
redis.call('mset', fence, token, data, value)
return 1
