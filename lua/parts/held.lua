-- parts/held: how often an owner holds a reentrant record, in digits; false: it does not.
local function held_by(lock, owner)
    local record = redis.call('hmget', lock, owner, 'mode')
    -- a reader's field has the same name
    return not record[2] and record[1]
end
