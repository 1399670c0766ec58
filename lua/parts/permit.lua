-- parts/permit: the name of an owner's n-th permit. The first has the owner's text; the others add a space and the number.
local function permit(owner, n)
    return n == 1 and owner or owner .. ' ' .. n
end

-- calls `each` with every permit of an owner, and its score, while it returns true; returns how often it did
local function each_permit(leases, owner, each)
    local n = 1
    local score = redis.call('zscore', leases, permit(owner, n))
    while score and each(permit(owner, n), tonumber(score)) do
        n = n + 1
        score = redis.call('zscore', leases, permit(owner, n))
    end
    return n - 1
end
