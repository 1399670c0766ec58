-- fair_permits/acquire: make this owner hold `count` permits, in turn. Safe to send twice.
--
-- KEYS[1]  leases    zset     permit -> when it expires, in milliseconds of the server's clock
-- KEYS[2]  counter   string   how many permits are available, without those that have expired
-- KEYS[3]  queue     zset     waiting owner -> its place
-- KEYS[4]  seen      zset     waiting owner -> when it expires, in milliseconds of the server's clock, plus the number of permits
--                             that it wants / 1024; clock -> when one was seen last; told -> the place of the last one that was told
-- ARGV[1]  owner     string   "<client>:<task>"
-- ARGV[2]  lease     integer  milliseconds, at least 1
-- ARGV[3]  count     integer  how many permits, 1 to 999
-- ARGV[4]  total     integer  how many there are if there is no counter yet, 1 or more, at most 10 digits
-- ARGV[5]  channel   string   where Redisson's waiters listen; those of the queue add ":" and their owner
-- ARGV[6]  patience  integer  milliseconds after which a silent waiter expires, at least 1
-- ARGV[7]  waits     integer  1: take a place in the queue if too few are available
-- Parts    permit, available, counter, time, take, in_line
-- Returns  1                 acquired: each permit's lease is at least `lease`
--          {0, time, ahead}  busy: milliseconds until the next try, and how many wait before it beside those that may go at once
--          -3                WRONG_KIND: the key of the counter holds something else
local patience, waits = ARGV[6], ARGV[7]
if not string.find(patience, '^[1-9]%d*$') or waits ~= '0' and waits ~= '1' then
    return redis.error_reply('ERR nestlock: patience must be an integer of at least 1, waits 0 or 1')
end

local length, room = redis.call('zcard', queue), free or total - redis.call('zcard', leases)
local waiters, dead, all = first(length, room, owner, tonumber(patience))
-- what those want that came before this waiter
local ahead, passed = 0, false
for _, waiter in ipairs(waiters) do
    passed = passed or waiter == owner
    if not passed then ahead = ahead + wants[waiter] end
end
-- behind those that could need all there is
if not passed and not all then ahead = math.huge end
local reply, left = take(ahead, true)
if reply == 1 then
    if passed or not all then dead[#dead + 1] = owner end
    remove(dead, length)
    if #waiters > (passed and 1 or 0) then tell(waiters, owner, left + expired()) end
    return 1
end
if reply.err then return reply end

local before = redis.call('zrank', queue, owner) or length
-- another program's key is refused here
local known = redis.call('zrangebyscore', seen, '-inf', late == 0 and '-inf' or '+inf', 'withscores')
local function move_ends()
    for n = 1, #known, 2 do
        redis.pcall('zadd', seen, string.format('%.17g', moved(tonumber(known[n + 1]))), known[n])
    end
    redis.pcall('zadd', seen, 'xx', now, 'clock', told, 'told')
end
if waits == '1' then
    local place = tonumber(redis.call('zscore', queue, owner) or (redis.call('zrange', queue, -1, -1, 'withscores')[2] or 0) + 1)
    -- keys whose waiters are all dead go by themselves
    local lives = math.max(10 * patience, redis.call('pttl', queue), redis.call('pttl', seen))
    local added = redis.pcall('zadd', queue, 'nx', place, owner)
    if type(added) ~= 'number' then return added end
    local kept = redis.pcall('pexpire', queue, lives)
    if type(kept) ~= 'number' then
        if added == 1 then redis.call('zrem', queue, owner) end
        return kept
    end
    if late ~= 0 then move_ends() end
    length = length + added
    told, wants[owner], places[owner] = math.min(told, place - 1), wanted, place
    redis.call('zadd', seen, string.format('%.17g', now + patience + wanted / 1024), owner, now, 'clock', told, 'told')
    redis.call('pexpire', seen, lives)
elseif late ~= 0 then
    -- it counts once
    move_ends()
end
remove(dead, length)
tell(waiters, nil, room + expired())
-- there may be more of the dead
local time = #dead < 1000 and math.ceil(patience / 3) or 1
return {0, reply[2] >= 0 and math.min(reply[2], time) or time, math.max(before - #dead - all_permits() + 1, 0)}
