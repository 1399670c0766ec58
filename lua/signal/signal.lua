-- signal/signal: tell one waiter, if the lock is free: whoever was told before is gone. Safe to send twice.
--
-- KEYS[1]  lock     string   the owner; its TTL is the lease, in whole seconds
-- KEYS[2]  signal   list     one element, which whoever pops it takes as "free now"
-- ARGV[1]  life     integer  of the signal, in milliseconds
-- Returns  1        one waiter is told
--          0        held: its release will tell one
local lock, signal, life = KEYS[1], KEYS[2], ARGV[1]

if not string.find(life, '^[1-9]%d*$') or #life > 15 then
    return redis.error_reply('ERR nestlock: life must be an integer of at least 1')
end

if redis.call('get', lock) then return 0 end
local told = redis.pcall('lpush', signal, '1')
if type(told) == 'table' then
    -- a write that needs no memory lets the next one pass on a server that is out of memory
    redis.call('ltrim', signal, 0, -1)
    told = redis.call('lpush', signal, '1')
end
local done = redis.pcall('pexpire', signal, life)
if done ~= 1 then
    -- refused: nobody is told
    redis.call('ltrim', signal, 1, -1)
    return done
end
-- one element for each release; nobody came for the others
if told > 1 then redis.pcall('ltrim', signal, 0, 0) end
return 1
