-- parts/time: the server's time, in milliseconds since 1970.
local function server_time()
    local time = redis.call('time')
    return time[1] * 1000 + math.floor(time[2] / 1000)
end
