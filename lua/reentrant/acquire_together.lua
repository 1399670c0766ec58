-- reentrant/acquire_together: make this owner hold each lock once; all of them or none. Safe to send twice.
--
-- KEYS[n]  lock     hash     owner -> hold count; its TTL is the lease
-- ARGV[1]  owner    string   "<client>:<task>"
-- ARGV[2]  lease    integer  milliseconds, at least 1
-- Parts    owner, raises
-- Returns  1        acquired: each hold count is at least 1, each TTL at least `lease`
--          {n, why}  nothing was written, because lock n is not available:
--          >= 0     busy: milliseconds until the other owner's lease ends
--          -1       busy, and the record has no TTL
--          -3       WRONG_KIND: the hash at this name is not a record of this kind
local owner, lease, ttls, held, raised = ARGV[1], ARGV[2], {}, {}, {}

if not string.find(lease, '^[1-9]%d*$') then
    return redis.error_reply('ERR nestlock: lease must be an integer of at least 1')
end

for n, lock in ipairs(KEYS) do
    ttls[n] = redis.call('pttl', lock)
    if ttls[n] ~= -2 then
        -- a record of this kind has exactly one field
        local record = redis.call('hlen', lock) == 1 and redis.call('hgetall', lock) or {''}
        if not is_owner(record[1]) then return {n, -3} end
        if record[1] ~= owner then return {n, ttls[n]} end
        held[n] = record[2]
    end
end

for n, lock in ipairs(KEYS) do
    raised[n] = raises(held[n], '1', 9)
    if raised[n] then redis.call('hset', lock, owner, '1') end
end
for n, lock in ipairs(KEYS) do
    local set = ttls[n] == -1 or ttls[n] >= tonumber(lease) or redis.pcall('pexpire', lock, lease)
    if type(set) == 'table' then
        -- undo the writes: a record without a TTL would never expire. A server that refuses one PEXPIRE refuses the first
        for at, taken in ipairs(KEYS) do
            if not held[at] then
                redis.call('del', taken)
            elseif raised[at] then
                redis.call('hset', taken, owner, held[at])
            end
        end
        return set
    end
end
return 1
