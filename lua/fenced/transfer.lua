-- fenced/transfer: as reentrant/transfer, and count the token up: the one before may still be on its way. Safe to send twice.
--
-- KEYS[1]  lock     hash     owner -> hold count; its TTL is the lease
-- KEYS[2]  token    string   the last token given, an integer without a TTL
-- ARGV[1]  from     string   who holds it
-- ARGV[2]  to       string   who holds it then, once
-- ARGV[3]  lease    integer  milliseconds, at least 1: the TTL from now on, also where that is less
-- Parts    held, moves, token
-- Returns  {1, token}  `to` holds it; if it did so before, only a missing token is written again
--          -2          LOST: neither holds it
local moves = held_by(lock, from)
if not moves and not held_by(lock, to) then return -2 end
if last and not moves then return {1, tonumber(last)} end

-- a write that needs no memory lets the next ones pass on a server that is out of memory
redis.call('hdel', lock, '')
-- one that comes late leaves the count, which may be nested by now
if moves then redis.call('hset', lock, to, '1') end
local given, refused = next_token()
if moves and not refused then
    local set = redis.pcall('pexpire', lock, lease)
    refused = type(set) == 'table' and set.err
    if refused then take_token_back() end
end
if refused then
    -- what is refused has moved nothing
    if moves then redis.call('hdel', lock, to) end
    return redis.error_reply(refused)
end
if moves then redis.call('hdel', lock, from) end
return {1, tonumber(given)}
