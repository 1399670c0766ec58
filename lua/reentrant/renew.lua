-- reentrant/renew: let each lock live for at least `lease` from now, if its owner still holds it. Safe to send twice.
--
-- KEYS[n]     lock   hash     owner -> hold count; its TTL is the lease
-- ARGV[2n-1]  owner  string   who must hold KEYS[n]
-- ARGV[2n]    lease  integer  milliseconds, at least 1
-- Returns     list   for each lock, in order:
--             1      renewed; a longer TTL is left as it is
--             0      GONE: no such record
--             -1     TAKEN: the record is there, but this owner is not in it
--             -2     UNKNOWN: the server refused this one; try again
--             error  of the server, if there is one lock only and it is refused
local answers, fit = {}, #ARGV == 2 * #KEYS

for n = 1, #KEYS do
    fit = fit and string.find(ARGV[2 * n], '^[1-9]%d*$')
end
if not fit then
    return redis.error_reply('ERR nestlock: renew needs an owner and a lease of at least 1 for each lock')
end

for n, lock in ipairs(KEYS) do
    local owner, lease = ARGV[2 * n - 1], ARGV[2 * n]
    -- pcall: one bad record must not cost the others their renewal
    local record, ttl = redis.pcall('hmget', lock, owner, 'mode'), redis.pcall('pttl', lock)
    local refused = record.err and record or type(ttl) == 'table' and ttl
    -- a reader's field has the same name
    local held = record[1] and not record[2]
    if held and not refused and ttl ~= -1 and ttl < tonumber(lease) then
        local set = redis.pcall('pexpire', lock, lease)
        refused = type(set) == 'table' and set
    end
    if refused and string.find(refused.err, 'WRONGTYPE', 1, true) then
        answers[n] = -1
    elseif refused and #KEYS == 1 then
        return refused
    elseif refused then
        answers[n] = -2
    elseif held then
        answers[n] = 1
    else
        answers[n] = ttl == -2 and 0 or -1
    end
end
return answers
