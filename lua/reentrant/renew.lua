-- reentrant/renew: extend each lock's TTL to at least `lease` from now, if its owner still holds it. Safe to send twice.
--
-- KEYS[n]     lock   hash     owner -> hold count; its TTL is the lease
-- ARGV[2n-1]  owner  string   the owner that must hold KEYS[n]
-- ARGV[2n]    lease  integer  milliseconds, at least 1
-- Parts       held, renew_each
-- Returns     list   for each lock, in order:
--             1      renewed; a longer TTL is unchanged
--             0      GONE: no such record
--             -1     TAKEN: the record is there, but this owner is not in it
--             -2     UNKNOWN: the server refused this one; try again
--             error  the server's, if the only lock of the request is refused
return renew_each(function(lock, owner, lease)
    local ttl = redis.call('pttl', lock)
    if not held_by(lock, owner) then return ttl == -2 and 0 or -1 end
    lengthen(lock, ttl, lease)
    return 1
end)
