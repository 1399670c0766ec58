-- permits/acquire: make this owner hold `count` permits. Safe to send twice.
--
-- KEYS[1]  leases   zset     permit -> when it expires, in milliseconds of the server's clock
-- KEYS[2]  counter  string   how many permits are available, without those that have expired
-- ARGV[1]  owner    string   "<client>:<task>"
-- ARGV[2]  lease    integer  milliseconds, at least 1
-- ARGV[3]  count    integer  how many permits, 1 to 999
-- ARGV[4]  total    integer  how many there are if there is no counter yet, at most 10 digits. 0: none until there is one
-- ARGV[5]  channel  string   where waiters listen
-- Parts    permit, available, counter, time, take
-- Returns  1         acquired: each permit's lease is at least `lease`
--          {0, ttl}  busy: milliseconds until the next permit expires; -1: none does
--          -3        WRONG_KIND: the key of the counter holds something else
local reply = take(0)
return reply
