-- permits/inspect: the owners of permits, and how long the last of them lasts. Read-only.
--
-- KEYS[1]  leases   zset     permit -> when it expires, in milliseconds of the server's clock
-- Parts    time
-- Returns  nil      none is taken
--          list     {milliseconds until the last permit expires or -1, owner, number of permits, ...}; a permit of
--                   Redisson's is its own owner, in hexadecimal digits
local leases, now = KEYS[1], server_time()
local taken = redis.call('zrangebyscore', leases, '(' .. now, '+inf', 'withscores')
if #taken == 0 then return nil end

local last = tonumber(taken[#taken])
local answer, place = {last < 922337203685477 and math.ceil(last - now) or -1}, {}
for n = 1, #taken, 2 do
    local owner = string.match(taken[n], '^([^ ]+) %d+$') or taken[n]
    -- Redisson's are 16 random bytes; ours have the dash of a UUID at the 9th and the ":" at the 37th
    if string.byte(owner, 9) ~= 45 or string.byte(owner, 37) ~= 58 then
        owner = string.gsub(taken[n], '.', function(byte) return string.format('%02x', string.byte(byte)) end)
    end
    if not place[owner] then
        place[owner] = #answer + 2
        answer[#answer + 1] = owner
        answer[#answer + 1] = 0
    end
    answer[place[owner]] = answer[place[owner]] + 1
end
return answer
