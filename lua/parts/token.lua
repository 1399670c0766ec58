-- parts/token: the last token of a fenced lock, and the next one.
local token = KEYS[2]

local last = redis.call('get', token)
-- beyond 2^53 Lua's numbers skip integers: two holders would get the same token
if last and (not string.find(last, '^%d+$') or tonumber(last) > 9007199254740990) then
    return redis.error_reply('ERR nestlock: the token key holds no token, an integer below 2^53 - 1')
end
-- never counted up, or lost: the server's time in microseconds is above every earlier token
local now = not last and redis.call('time')

-- returns the token, and the server's error if it refused to count up
local function next_token()
    if not last then
        local first = now[1] .. string.format('%06d', now[2])
        return first, redis.pcall('set', token, first).err
    end
    local given = redis.pcall('incr', token)
    return given, type(given) == 'table' and given.err
end

local function take_token_back()
    if last then redis.call('set', token, last) else redis.call('del', token) end
end
