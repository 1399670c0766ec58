-- parts/permits: calls `each` with every permit of an owner, and its score, while it returns true; returns how often it did. The
-- first permit of an owner is the owner's text; the others add a space and a number from 2.
local function each_permit(leases, owner, each)
    local permit, n = owner, 0
    local score = redis.call('zscore', leases, permit)
    while score and each(permit, tonumber(score)) do
        n = n + 1
        permit = owner .. ' ' .. n + 1
        score = redis.call('zscore', leases, permit)
    end
    return n
end
