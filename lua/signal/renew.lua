-- signal/renew: extend each lock's TTL to at least `lease` from now, if its owner still holds it. Safe to send twice.
--
-- KEYS[n]     lock   string   the owner; its TTL is the lease, in whole seconds
-- ARGV[2n-1]  owner  string   the owner that must hold KEYS[n]
-- ARGV[2n]    lease  integer  milliseconds, at least 1, rounded up to seconds
-- Parts       renew_each
-- Returns     list   for each lock, in order:
--             1      renewed; a longer TTL is unchanged
--             0      GONE: no such record
--             -1     TAKEN: the record names another owner, or is not a lock
--             -2     UNKNOWN: the server refused this one; try again
--             -4     ENDLESS: this owner holds it, and the record has no TTL; it stays so
--             error  the server's, if the only lock of the request is refused
return renew_each(function(lock, owner, lease)
    local holder = redis.call('get', lock)
    if holder ~= owner then return holder and -1 or 0 end
    local ttl = redis.call('pttl', lock)
    if ttl == -1 then return -4 end
    local seconds = math.ceil(tonumber(lease) / 1000)
    if ttl < seconds * 1000 then redis.call('expire', lock, seconds) else lengthen(lock, ttl, ttl) end
    return 1
end)
