-- parts/clock: the server's time, `now`, by which the waiters of a fair queue are judged, once `look_at_clock` was called. If it
-- went back, what it gave before is too late by so much, `ahead`: the dead would be believed until it is there again.
local timeouts, seen, now, ahead, given = KEYS[3], KEYS[4], 0, 0, {}
local function look_at_clock()
    now = server_time()
    ahead = (tonumber(redis.call('zscore', seen, 'clock')) or now) - now
    -- servers differ by less
    if ahead < 1000 then ahead = 0 end
    if ahead > 0 then given = redis.call('zrangebyscore', seen, '-inf', '+inf', 'withscores') end
end

-- until when one of ours counts as here, and its score; nil: it is not one of ours
local function seen_until(waiter)
    local score = redis.call('zscore', seen, waiter)
    return score and score - ahead or nil, score
end

-- what was given goes back, too; where nothing can be written, later
local function go_back()
    for at = 1, #given, 2 do
        local theirs = redis.call('zscore', timeouts, given[at])
        redis.pcall('zadd', seen, string.format('%.17g', given[at + 1] - ahead), given[at])
        if theirs then redis.pcall('zadd', timeouts, string.format('%.17g', theirs - ahead), given[at]) end
    end
end
