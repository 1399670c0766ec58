-- read_write/write_transfer: give the write hold of one owner to another. Safe to send twice: the new owner's name is used only once.
--
-- KEYS[1]  lock     hash     mode -> read or write, reader -> hold count, writer:write -> hold count; has a TTL
-- ARGV[1]  from     string   the present writer
-- ARGV[2]  to       string   the next writer, with a hold count of 1
-- ARGV[3]  lease    integer  milliseconds, at least 1: the TTL from now on, even if that is shorter
-- Parts    moves
-- Returns  1         `to` holds it; if it already did, nothing was written
--          -2        LOST: neither holds it
if redis.call('hexists', lock, from .. ':write') == 0 then
    return redis.call('hexists', lock, to .. ':write') == 1 and 1 or -2
end
if redis.call('hexists', lock, from) == 1 then
    return redis.error_reply('ERR nestlock: who reads inside its own writing cannot hand that over')
end

-- out of memory, a server denies only a script's first write, and never HDEL: this lets later writes pass
redis.call('hdel', lock, '')
redis.call('hset', lock, to .. ':write', '1')
local set = redis.pcall('pexpire', lock, lease)
-- a refused transfer must leave the hold where it was
redis.call('hdel', lock, (set == 1 and from or to) .. ':write')
return set
