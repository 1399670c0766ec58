-- parts/tell_one: wakes one waiter of a signal lock. If the server denies the call, none is woken.
local lock, signal = KEYS[1], KEYS[2]

-- `frees`: also delete the lock's record. Returns 1, or the error
local function tell_one(life, frees)
    local told = redis.pcall('lpush', signal, '1')
    if type(told) == 'table' then
        -- out of memory, a server denies only a script's first write, and never HDEL: this lets later writes pass
        local list = redis.pcall('ltrim', signal, 0, -1)
        -- another program's key: waiters of this lock cannot listen there either, and poll the lock
        if frees and list.err and string.find(list.err, 'WRONGTYPE', 1, true) then
            redis.call('del', lock)
            return 1
        end
        told = redis.call('lpush', signal, '1')
    end
    -- a signal that no waiter took gets the TTL of a new one; if the server denies the rest, its own TTL back
    local left = told > 1 and redis.pcall('pttl', signal)
    local refused = redis.pcall('pexpire', signal, life)
    if refused == 1 then refused = frees and redis.pcall('del', lock) end
    if type(refused) == 'table' then
        -- no waiter is woken
        redis.call('ltrim', signal, 1, -1)
        if (tonumber(left) or 0) > 0 then redis.pcall('pexpire', signal, left) end
        return refused
    end
    -- one element per release; no waiter took the others
    if told > 1 then redis.pcall('ltrim', signal, 0, 0) end
    return 1
end
