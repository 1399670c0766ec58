-- parts/mode: which side of a read-write lock is held, `mode`; false: none. Answers a hash that is no such lock.
local lock = KEYS[1]
local mode = redis.call('hget', lock, 'mode')
if mode ~= 'read' and mode ~= 'write' and redis.call('hlen', lock) > 0 then return -3 end
