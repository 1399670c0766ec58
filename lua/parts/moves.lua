-- parts/moves: the arguments of a transfer: from which owner, to which, with what lease.
local lock, from, to, lease = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
if from == to or not string.find(lease, '^[1-9]%d*$') then
    return redis.error_reply('ERR nestlock: a transfer needs two owners and a lease of at least 1')
end
