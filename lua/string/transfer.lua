-- string/transfer: give the hold of one owner to another. Safe to send twice: the new owner's name is used only once.
--
-- KEYS[1]  lock     string   the owner; its TTL is the lease
-- ARGV[1]  from     string   the present owner
-- ARGV[2]  to       string   the next owner
-- ARGV[3]  lease    integer  milliseconds: the TTL from now on, even if that is shorter; 0: no TTL
-- Returns  1         `to` holds it; if it already did, nothing was written
--          -2        LOST: neither holds it
local lock, from, to, lease = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
if from == to or lease ~= '0' and not string.find(lease, '^[1-9]%d*$') then
    return redis.error_reply('ERR nestlock: a transfer needs two owners and a lease of at least 0')
end

local holder = redis.call('get', lock)
if holder ~= from then return holder == to and 1 or -2 end
if lease == '0' then
    redis.call('set', lock, to)
    return 1
end
redis.call('set', lock, to, 'PX', lease)
return 1
