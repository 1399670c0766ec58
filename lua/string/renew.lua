-- string/renew: extend each lock's TTL to at least `lease` from now, if its owner still holds it. Safe to send twice.
--
-- KEYS[n]     lock   string   the owner; its TTL is the lease
-- ARGV[2n-1]  owner  string   the owner that must hold KEYS[n]
-- ARGV[2n]    lease  integer  milliseconds, at least 1
-- Parts       renew_each
-- Returns     list   for each lock, in order:
--             1      renewed; a longer TTL is unchanged
--             0      GONE: no such record
--             -1     TAKEN: the record names another owner
--             -2     UNKNOWN: the server refused this one; try again
--             error  the server's, if the only lock of the request is refused
return renew_each(function(lock, owner, lease)
    local holder = redis.call('get', lock)
    if holder ~= owner then return holder and -1 or 0 end
    lengthen(lock, redis.call('pttl', lock), lease)
    return 1
end)
