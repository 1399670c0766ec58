-- parts/life: how long the longest of a reader's holds lives, from one of them on; -2: all are over.
local function life(of, reader, from, count)
    local longest = -2
    -- bounded: a damaged count must not keep the server busy
    local last, key = math.min(count, 99999), of .. reader .. ':rwlock_timeout:'
    for n = from, last do longest = math.max(longest, redis.call('pttl', key .. n)) end
    return longest
end
