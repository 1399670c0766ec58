-- parts/once: a request that is sent again changes nothing and gets the reply of the first, which `once` keeps for a minute.
local request = KEYS[1]
local earlier = redis.call('get', request)
if earlier then return {tonumber(earlier)} end
-- lets the server refuse a change, if it does, before any message: this writes nothing. Without memory, a server refuses SET only
-- where nothing was written before
local function may_write()
    redis.call('set', request, '', 'xx')
end
local function once(reply)
    redis.call('set', request, reply, 'px', 60000)
    return {reply}
end
