-- read_write/write_transfer: give the write hold of one owner to another. Safe to send twice: the new owner's name is used only once.
--
-- KEYS[1]  lock     hash     mode -> read or write, reader -> hold count, writer:write -> hold count; has a TTL
-- ARGV[1]  from     string   who writes
-- ARGV[2]  to       string   who writes then, once
-- ARGV[3]  lease    integer  milliseconds, at least 1: the TTL from now on, also where that is less
-- Parts    moves
-- Returns  1         `to` writes; if it did so before, nothing was written
--          -2        LOST: neither writes
if redis.call('hexists', lock, from .. ':write') == 0 then
    return redis.call('hexists', lock, to .. ':write') == 1 and 1 or -2
end
if redis.call('hexists', lock, from) == 1 then
    return redis.error_reply('ERR nestlock: who reads inside its own writing cannot hand that over')
end

-- a write that needs no memory lets the next ones pass on a server that is out of memory
redis.call('hdel', lock, '')
redis.call('hset', lock, to .. ':write', '1')
local set = redis.pcall('pexpire', lock, lease)
-- what is refused has moved nothing
redis.call('hdel', lock, (set == 1 and from or to) .. ':write')
return set
