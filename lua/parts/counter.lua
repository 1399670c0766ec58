-- parts/counter: the number of available permits, `free`; false: there is no counter. Returns -3 if the key is no counter.
local counter = KEYS[2]
local free = redis.call('get', counter)
if free and free ~= '0' and not (string.find(free, '^%-?[1-9]%d*$') and #free < 16) then return -3 end
free = free and tonumber(free)
