-- fair_permits/release: give back this owner's permits, tell the waiters that come next; 0 leaves the queue. Safe to send twice.
--
-- KEYS[1]  leases   zset     permit -> when it expires, in milliseconds of the server's clock
-- KEYS[2]  counter  string   how many permits are available, without those that have expired
-- KEYS[3]  queue    zset     waiting owner -> its place
-- KEYS[4]  seen     zset     as of fair_permits/acquire
-- ARGV[1]  last     string   the owner's last permit: it must hold that many
-- ARGV[2]  holds    integer  0: give back all of them; 1: keep them
-- ARGV[3]  channel  string   where Redisson's waiters listen; those of the queue add ":" and their owner
-- ARGV[4]  total    integer  how many there are if there is no counter
-- Parts    permit, available, time, give, in_line
-- Returns  1        given back; the next waiters got the number that they want as a message
--          0        still held
--          nil      this owner holds fewer. Those that it had, or that had expired, were given back
local length = redis.pcall('zcard', queue)
if holds ~= '0' or length == 0 then
    local reply = give(true)
    return reply
end

local room = (tonumber(redis.pcall('get', counter)) or total - redis.call('zcard', leases)) + expired()
local waiters = first(length, room + count, owner)
local reply, more = give(true)
if more + remove({owner}, length) > 0 then tell(waiters, owner, room + more) end
return reply
