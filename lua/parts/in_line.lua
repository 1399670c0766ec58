-- parts/in_line: the waiters of fair permits, in order. One that is silent may be dead, and expires.
local queue, seen = KEYS[3], KEYS[4]
-- of the waiters that were read: how many permits each wants, and its place; the place of the last one that was told of room; by
-- how much ends are too early, if no waiter could ask (too late if below 0: the clock went back); how many permits there are
local wants, places, told, late, there = {}, {}, 0, 0, false

-- how many permits there are, taken ones included
local function all_permits()
    if not there then
        local left = tonumber(redis.pcall('get', counter))
        there = math.max(1, left and left + redis.call('zcard', leases) or tonumber(total))
    end
    return there
end

-- whether there are as many: a waiter for more holds up no others
local function are_there(number) return number <= all_permits() end

-- the score of a waiter, with its end moved by `late`. Later it is moved only once, until the waiter has asked again (1/2048): it may
-- be dead, and requests may be rare
local function moved(score)
    if late <= 0 then return score + late end
    return score % (1 / 1024) > 0 and score or score + late + 1 / 2048
end

-- the first waiters of `length`, as many as `room` permits could be for; those before `me` that have expired; whether these are all.
-- Waiters ask more often than once in half of their `patience`: in a longer pause, the server was stopped, or its clock set
local function first(length, room, me, patience)
    local waiters, dead, found, is_before = {}, {}, {}, true
    -- a key of another type has no waiters
    if (tonumber(length) or 0) == 0 then return waiters, dead, true end
    local most, at = math.min(math.max(room, 0), 900) + 16, 0
    repeat
        found = redis.call('zrange', queue, at, at + most - 1, 'withscores')
        local names = {}
        for n = 2, #found, 2 do
            names[n / 2] = found[n - 1]
            places[found[n - 1]] = tonumber(found[n])
        end
        local ends = redis.pcall('zmscore', seen, 'clock', 'told', unpack(names))
        local pause = now - (tonumber(ends[1]) or now)
        told = tonumber(ends[2]) or 0
        if pause < -1000 or patience and pause > patience / 2 then late = pause end
        for n, name in ipairs(names) do
            local score = tonumber(ends[n + 2]) or 0
            wants[name] = math.max(1, math.floor(score % 1 * 1024))
            is_before = is_before and name ~= me
            if name ~= me and (score == 0 or is_before and moved(score) <= now) then
                dead[#dead + 1] = name
            elseif name == me or are_there(wants[name]) then
                waiters[#waiters + 1] = name
            end
        end
        at = at + most
    until #names < most or #waiters >= most or #dead >= 1000
    return waiters, dead, #found < most * 2
end

-- how many permits have expired: they are available
local function expired()
    return tonumber(redis.pcall('zcount', leases, 0, now)) or 0
end

-- tells waiters that there is room for them, `without` one that is out of line. One that was told before is told again only if it
-- is the first: a message may be lost
local function tell(waiters, without, room)
    local before, last = 0, told
    for _, waiter in ipairs(waiters) do
        local number = wants[waiter]
        if waiter ~= without and are_there(number) then
            before = before + number
            if before > room then break end
            if places[waiter] > told or before == number then redis.pcall('publish', channel .. ':' .. waiter, number) end
            last = math.max(last, places[waiter])
        end
    end
    if last > told then redis.pcall('zadd', seen, 'xx', last, 'told') end
end

-- removes waiters of `length`, and returns how many there were
local function remove(waiters, length)
    local removed = 0
    for at = 1, #waiters, 1000 do
        local some = {unpack(waiters, at, math.min(at + 999, #waiters))}
        removed = removed + (tonumber(redis.pcall('zrem', queue, unpack(some))) or 0)
        redis.pcall('zrem', seen, unpack(some))
    end
    if removed > 0 and removed == length then redis.pcall('del', seen) end
    return removed
end
