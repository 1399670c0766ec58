-- parts/permit: the name of an owner's n-th permit. The first has the owner's text; the others add a space and the number.
local function permit(owner, n)
    return n == 1 and owner or owner .. ' ' .. n
end

-- the owner of a permit, and the number of that permit, 1 to 999
local function owner_of(name)
    local owner, number = string.match(name, '^([^ ]+) ([1-9]%d?%d?)$')
    return owner or name, tonumber(number or 1)
end

-- calls `each` with every permit of an owner that should have `count`, and its score. Others may have removed some of them,
-- and the owner may have more
local function each_permit(leases, owner, count, each)
    local names = {}
    for n = 1, count + 1 do names[n] = permit(owner, n) end
    local scores, n = redis.call('zmscore', leases, unpack(names)), 1
    while n <= count or scores[n] do
        if scores[n] then each(permit(owner, n), tonumber(scores[n])) end
        n = n + 1
        if n > count + 1 then scores[n] = redis.call('zscore', leases, permit(owner, n)) end
    end
end
