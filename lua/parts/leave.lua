-- parts/leave: remove a waiting reader. When the last one leaves, the rest of the readers' turn is void.
local function leave(readers, reader)
    if redis.pcall('zrem', readers, reader) == 1 and redis.pcall('zcard', readers) == 1 then
        redis.pcall('zrem', readers, 'until')
    end
end
