-- fenced/transfer: as reentrant/transfer, and count the token up, as writes with the last may be in flight. Safe to send twice.
--
-- KEYS[1]  lock     hash     owner -> hold count; its TTL is the lease
-- KEYS[2]  token    string   the last token issued, an integer without a TTL
-- ARGV[1]  from     string   the present owner
-- ARGV[2]  to       string   the next owner, with a hold count of 1
-- ARGV[3]  lease    integer  milliseconds, at least 1: the TTL from now on, even if that is shorter
-- Parts    held, moves, token
-- Returns  {1, token}  `to` holds it; if it already did, only a missing token is written again
--          -2          LOST: neither holds it
local moves = held_by(lock, from)
if not moves and not held_by(lock, to) then return -2 end
if last and not moves then return {1, tonumber(last)} end

-- out of memory, a server denies only a script's first write, and never HDEL: this lets later writes pass
redis.call('hdel', lock, '')
-- a late duplicate must not reset the count, which may be above 1 by now
if moves then redis.call('hset', lock, to, '1') end
local given, refused = next_token()
if moves and not refused then
    local set = redis.pcall('pexpire', lock, lease)
    refused = type(set) == 'table' and set.err
    if refused then take_token_back() end
end
if refused then
    -- a refused transfer must leave the hold where it was
    if moves then redis.call('hdel', lock, to) end
    return redis.error_reply(refused)
end
if moves then redis.call('hdel', lock, from) end
return {1, tonumber(given)}
