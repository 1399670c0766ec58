-- parts/leave: a reader waits no more. What is left of the readers' turn ends with the last of them.
local function leave(readers, reader)
    if redis.pcall('zrem', readers, reader) == 1 and redis.pcall('zcard', readers) == 1 then
        redis.pcall('zrem', readers, 'until')
    end
end
