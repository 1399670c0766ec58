-- parts/permit: the name of an owner's n-th permit. The first has the owner's text; the others add a space and the number.
local function permit(owner, n)
    return n == 1 and owner or owner .. ' ' .. n
end

-- calls `each` with every permit of an owner, and its score, while it returns true; returns how often it did
local function each_permit(leases, owner, each)
    -- most owners have one
    local n, first = 1, redis.call('zmscore', leases, permit(owner, 1), permit(owner, 2))
    local score = first[1]
    while score and each(permit(owner, n), tonumber(score)) do
        n = n + 1
        score = n == 2 and first[2] or n > 2 and redis.call('zscore', leases, permit(owner, n))
    end
    return n - 1
end
