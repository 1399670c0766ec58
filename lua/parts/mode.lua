-- parts/mode: which side of a read-write lock is held, `mode`; false: none. Returns -3 for a hash of another kind.
local lock = KEYS[1]
local mode = redis.call('hget', lock, 'mode')
if mode ~= 'read' and mode ~= 'write' and redis.call('hlen', lock) > 0 then return -3 end
