-- reentrant/transfer: give the hold of one owner to another. Safe to send twice: the new owner's name is used only once.
--
-- KEYS[1]  lock     hash     owner -> hold count; its TTL is the lease
-- ARGV[1]  from     string   the present owner
-- ARGV[2]  to       string   the next owner, with a hold count of 1
-- ARGV[3]  lease    integer  milliseconds, at least 1: the TTL from now on, even if that is shorter
-- Parts    held, moves
-- Returns  1         `to` holds it; if it already did, nothing was written
--          -2        LOST: neither holds it
if not held_by(lock, from) then return held_by(lock, to) and 1 or -2 end

-- out of memory, a server denies only a script's first write, and never HDEL: this lets later writes pass
redis.call('hdel', lock, '')
redis.call('hset', lock, to, '1')
local set = redis.pcall('pexpire', lock, lease)
-- a refused transfer must leave the hold where it was
redis.call('hdel', lock, set == 1 and from or to)
return set
