-- permits/release: give back this owner's permits. Safe to send twice.
--
-- KEYS[1]  leases   zset     permit -> when it expires, in milliseconds of the server's clock
-- KEYS[2]  counter  string   how many permits are available, without those that have expired
-- ARGV[1]  last     string   the owner's last permit: it must hold that many
-- ARGV[2]  holds    integer  0: give back all of them; 1: keep them
-- ARGV[3]  channel  string   where waiters listen
-- ARGV[4]  total    integer  0: a semaphore, whose messages are the number available
-- Parts    permit, available, time, give
-- Returns  1        given back; waiters got the number of permits as a message
--          0        still held
--          nil      this owner holds fewer. Those that it had, or that had expired, were given back
local reply = give()
return reply
