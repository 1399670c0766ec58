-- fenced/get: read a value, and reject lower tokens from now on. Safe to send twice.
--
-- KEYS[1]  data     string   the guarded value
-- KEYS[2]  fence    string   the highest token seen, an integer without a TTL
-- ARGV[1]  token    integer  the reader's token, 1 to 2^53 - 1
-- Returns  {1, value}  read; nil: no value
--          {0, seen}   STALE: the highest token seen, which is above the reader's
local data, fence, token = KEYS[1], KEYS[2], ARGV[1]

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
local value = redis.call('get', data)

if tonumber(seen) > tonumber(token) then return {0, tonumber(seen)} end
if tonumber(seen) < tonumber(token) then redis.call('set', fence, token) end
return {1, value}
