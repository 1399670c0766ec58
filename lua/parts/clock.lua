-- parts/clock: the server's time, `now`, by which a fair queue's waiters expire; call `look_at_clock` first. If the clock went
-- back, earlier scores are too late by `ahead` milliseconds: dead waiters would stay until the clock caught up.
local timeouts, seen, now, ahead, given = KEYS[3], KEYS[4], 0, 0, {}
local function look_at_clock()
    now = server_time()
    ahead = (tonumber(redis.call('zscore', seen, 'clock')) or now) - now
    -- less is no jump: the clocks of two servers may differ by this much
    if ahead < 1000 then ahead = 0 end
    if ahead > 0 then given = redis.call('zrangebyscore', seen, '-inf', '+inf', 'withscores') end
end

-- when a waiter of ours expires, and its score; nil: the waiter is not one of ours
local function seen_until(waiter)
    local score = redis.call('zscore', seen, waiter)
    return score and score - ahead or nil, score
end

-- move earlier scores back as well; if the server denies the write, a later call does it
local function go_back()
    for at = 1, #given, 2 do
        local theirs = redis.call('zscore', timeouts, given[at])
        redis.pcall('zadd', seen, string.format('%.17g', given[at + 1] - ahead), given[at])
        if theirs then redis.pcall('zadd', timeouts, string.format('%.17g', theirs - ahead), given[at]) end
    end
end
