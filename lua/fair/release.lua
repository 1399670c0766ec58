-- fair/release: make this owner hold the lock `holds` times, fewer than now; 0 leaves the queue. Safe to send twice.
--
-- KEYS[1]  lock      hash     owner -> hold count; its TTL is the lease
-- KEYS[2]  queue     list     waiting owners, the next one first
-- KEYS[3]  timeouts  zset     waiting owner -> when it expires for Redisson, in milliseconds since 1970
-- KEYS[4]  seen      zset     waiting owner of ours -> when it expires, in milliseconds of the server's clock, plus its
--                             turn / 1024; cut -> the score that fair/acquire lowered last; clock -> when a score was
--                             written last
-- ARGV[1]  owner     string   "<client>:<task>"
-- ARGV[2]  holds     string   the count that this call leads to; 0 frees the lock
--                             n>m: the same as m, if the record says n holds
-- ARGV[3]  channel   string   where waiters listen, each with ":" and its name added
-- ARGV[4]  grants    integer  1: a waiter with a turn gets the lock, at first for as long as it would have kept its place
-- Parts    fewer, time, clock
-- Returns  1         no longer held; the next waiter got the message "0" (free), or holds the lock now and got as
--                    its message its score in KEYS[4], a space, and the TTL in milliseconds
--          0         still held, at most `holds` times; the TTL is unchanged
--          nil       this owner neither holds it nor waits any longer, whatever else is at the lock's name
--          list      CHANGED: {0, holds}: the record does not say n of n>m; nothing was written
local lock, queue = KEYS[1], KEYS[2]
local owner, channel, grants = ARGV[1], ARGV[3], ARGV[4]
-- a read-write lock's reader has a field of the same name; with 0, a key of another type belongs to another lock
local mode = redis.pcall('hexists', lock, 'mode')
if holds ~= '0' and mode ~= 0 and mode ~= 1 then return mode end
local held = mode == 0 and redis.call('hget', lock, owner)
if only and not held then return nil end
if only and held ~= only then return {0, tonumber(held)} end
if holds ~= '0' then
    if not held then return nil end
    if tonumber(held) > tonumber(holds) then
        -- out of memory, a server denies only a script's first write, and never HDEL: this lets later writes pass
        redis.call('hdel', lock, '')
        redis.call('hset', lock, owner, holds)
    end
    return 0
end

local others = mode == 0 and redis.call('hlen', lock) - (held and 1 or 0) or 1
local head, dead, due, place, first, at = redis.call('lindex', queue, 0), {}, nil, nil, 0, 0
-- a holder does not wait: do not search a long queue for it
local waits = redis.call('zscore', timeouts, owner) or not held
-- a key of another type must fail before anything is written
if waits then redis.call('zscore', seen, owner) end
local tells = head and others == 0 and (held or head == owner)
if tells then
    look_at_clock()
    while head do
        due, place = seen_until(head)
        local gone = tonumber(due or redis.call('zscore', timeouts, head)) or math.huge
        if head ~= owner and gone > now then break end
        if head ~= owner then dead[#dead + 1] = head end
        at = at + 1
        head = redis.call('lindex', queue, at)
    end
    if head and due and due % 1 > 0 then first = math.floor(due - now) end
end
if waits then dead[#dead + 1] = owner end
-- let the server refuse these commands, if it does, before anything is written
if #dead > 0 or first > 0 then redis.call('zrem', timeouts, '') redis.call('lrem', queue, 1, '') end
-- grant the lock to the next waiter, unless the server refuses: it may be out of memory
local function granted()
    local ttl = redis.call('pttl', lock)
    if grants ~= '1' or not held or first < 1 or ttl < 1 then return false end
    redis.call('hdel', lock, '')
    local set = redis.pcall('hset', lock, head, 1) == 1 and redis.pcall('pexpire', lock, first)
    local heard = set == 1 and redis.pcall('publish', channel .. ':' .. head, place .. ' ' .. first)
    if type(heard) == 'number' then return true end
    redis.call('hdel', lock, head)
    if set == 1 then redis.call('pexpire', lock, ttl) end
    return false
end
if tells and head and granted() then
    dead[#dead + 1] = head
    others = 1
elseif tells and head then
    -- publish first: if PUBLISH is denied, nothing is written. No other client runs before this script ends
    redis.call('publish', channel .. ':' .. head, '0')
end
-- DEL and HDEL work when the server is out of memory; other fields are not ours to delete
if held and others == 0 then redis.call('del', lock) elseif held then redis.call('hdel', lock, owner) end
for _, waiter in ipairs(dead) do
    redis.call('lrem', queue, waiter == owner and 0 or 1, waiter)
    redis.call('zrem', timeouts, waiter)
    redis.call('zrem', seen, waiter, 'cut')
end
if #dead > 0 and redis.pcall('zcard', seen) == 1 then redis.call('zrem', seen, 'clock') end
return held and 1 or nil
