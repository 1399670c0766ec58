-- parts/life: the longest TTL of a reader's holds, from number `from` on; -2: all have expired.
local function life(of, reader, from, count)
    local longest = -2
    -- capped: a corrupt count must not block the server
    local last, key = math.min(count, 99999), of .. reader .. ':rwlock_timeout:'
    for n = from, last do longest = math.max(longest, redis.call('pttl', key .. n)) end
    return longest
end
