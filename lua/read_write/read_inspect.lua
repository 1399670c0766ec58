-- read_write/read_inspect: the readers, their hold counts and the TTL. Read-only.
--
-- KEYS[1]  lock     hash     mode -> read or write, reader -> hold count, writer:write -> hold count; has a TTL
-- Returns  nil      no reader holds the lock
--          list     {TTL in milliseconds or -1, then each reader and its hold count}
--          -3       WRONG_KIND: the hash at this name is not a record of this kind
local lock = KEYS[1]

local fields = redis.call('hgetall', lock)
if #fields == 0 then return nil end

local answer, mode = {redis.call('pttl', lock)}, nil
for at = 1, #fields, 2 do
    if fields[at] == 'mode' then
        mode = fields[at + 1]
    elseif not string.find(fields[at], ':write$') then
        answer[#answer + 1] = fields[at]
        answer[#answer + 1] = tonumber(fields[at + 1])
    end
end
if mode ~= 'read' and mode ~= 'write' then return -3 end
if #answer == 1 then return nil end
return answer
