-- reentrant/transfer: give the hold of one owner to another. Safe to send twice: the new owner's name is used only once.
--
-- KEYS[1]  lock     hash     owner -> hold count; its TTL is the lease
-- ARGV[1]  from     string   who holds it
-- ARGV[2]  to       string   who holds it then, once
-- ARGV[3]  lease    integer  milliseconds, at least 1: the TTL from now on, also where that is less
-- Parts    held, moves
-- Returns  1         `to` holds it; if it did so before, nothing was written
--          -2        LOST: neither holds it
if not held_by(lock, from) then return held_by(lock, to) and 1 or -2 end

-- a write that needs no memory lets the next ones pass on a server that is out of memory
redis.call('hdel', lock, '')
redis.call('hset', lock, to, '1')
local set = redis.pcall('pexpire', lock, lease)
-- what is refused has moved nothing
redis.call('hdel', lock, set == 1 and from or to)
return set
