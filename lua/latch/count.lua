-- latch/count: how many are still to be counted down. Changes nothing.
--
-- KEYS[1]  latch  string   the count; no key: 0
-- Returns  list   {the count}, 0 or more: an integer alone is at most 6
--          -3     WRONG_KIND: the key holds something else
local latch = KEYS[1]
-- GETEX without a TTL changes nothing, and a replica refuses it: it may not have the count yet, or any more
local count = redis.call('getex', latch)
if not count then return {0} end
if not (count == '0' or string.find(count, '^%-?[1-9]%d*$') and #count < 16) then return -3 end
return {math.max(0, tonumber(count))}
