-- signal/force_release: free the lock, whoever holds it, and tell one waiter. Safe to send twice.
--
-- KEYS[1]  lock     string   the owner; its TTL is the lease, in whole seconds
-- KEYS[2]  signal   list     one element, which whoever pops it takes as "free now"; left as it is if it is no list
-- ARGV[1]  life     integer  of the signal, in milliseconds
-- Returns  1        free now
--          0        nobody held it; one waiter is told all the same
local lock, signal, life = KEYS[1], KEYS[2], ARGV[1]

if not string.find(life, '^[1-9]%d*$') or #life > 15 then
    return redis.error_reply('ERR nestlock: life must be an integer of at least 1')
end

local held = redis.call('get', lock)
local told = redis.pcall('lpush', signal, '1')
if type(told) == 'table' then
    -- a write that needs no memory lets the next one pass on a server that is out of memory
    local list = redis.pcall('ltrim', signal, 0, -1)
    -- somebody else's key: waiters of this lock cannot listen there either, and look for themselves
    if list.err and string.find(list.err, 'WRONGTYPE', 1, true) then return redis.call('del', lock) end
    told = redis.call('lpush', signal, '1')
end
-- a signal that nobody came for lives on as long as a new one
local left = told > 1 and redis.pcall('pttl', signal)
local done = redis.pcall('pexpire', signal, life)
if done == 1 and held then done = redis.pcall('del', lock) end
if done ~= 1 then
    -- refused: nobody is told
    redis.call('ltrim', signal, 1, -1)
    if (tonumber(left) or 0) > 0 then redis.pcall('pexpire', signal, left) end
    return done
end
-- one element for each release; nobody came for the others
if told > 1 then redis.pcall('ltrim', signal, 0, 0) end
return held and 1 or 0
