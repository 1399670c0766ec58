-- reentrant/renew: let each lock live for at least `lease` from now, if its owner still holds it. Safe to send twice.
--
-- KEYS[n]    lock   hash     owner -> hold count; its TTL is the lease
-- ARGV[1]    lease  integer  milliseconds, at least 1
-- ARGV[n+1]  owner  string   who must hold KEYS[n]
-- Returns    list   for each lock, in order:
--            1      renewed; a longer TTL is left as it is
--            0      GONE: no such record
--            -1     TAKEN: the record is there, but this owner is not in it
--            -2     UNKNOWN: the server refused this one; try again
local lease, answers = ARGV[1], {}

if not string.find(lease, '^[1-9]%d*$') or #ARGV ~= #KEYS + 1 then
    return redis.error_reply('ERR nestlock: renew needs a lease of at least 1 and one owner for each lock')
end

for n, lock in ipairs(KEYS) do
    -- pcall: one bad record must not cost the others their renewal
    local held = redis.pcall('hexists', lock, ARGV[n + 1])
    local ttl = redis.pcall('pttl', lock)
    if held == 1 and ttl == -1 then
        answers[n] = 1
    elseif held == 1 then
        local set = ttl
        if ttl < tonumber(lease) then set = redis.pcall('pexpire', lock, lease) end
        answers[n] = type(set) == 'number' and 1 or -2
    elseif held == 0 then
        answers[n] = ttl == -2 and 0 or -1
    else
        answers[n] = string.find(held.err, 'WRONGTYPE', 1, true) and -1 or -2
    end
end
return answers
