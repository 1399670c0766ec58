-- parts/held: an owner's hold count in a reentrant record, in digits; false: it holds nothing.
local function held_by(lock, owner)
    local record = redis.call('hmget', lock, owner, 'mode')
    -- a read-write lock's reader has a field of the same name
    return not record[2] and record[1]
end
