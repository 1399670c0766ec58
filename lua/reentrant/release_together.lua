-- reentrant/release_together: make each owner hold none of its lock. Safe to send twice.
--
-- KEYS[n]     lock     hash    owner -> hold count; its TTL is the lease
-- ARGV[2n-1]  owner    string  "<client>:<task>", the owner of KEYS[n]
-- ARGV[2n]    channel  string  where waiters of KEYS[n] listen; empty: none do
-- Parts       held
-- Returns     list     the result of `release` for each lock, in order:
--             1        free now; waiters were notified
--             nil      this owner does not hold it
--             error    the server's, if it refuses one of them: nothing was written
local answers = {}

if #ARGV ~= 2 * #KEYS then
    return redis.error_reply('ERR nestlock: release_together needs an owner and a channel for each lock')
end

for n, lock in ipairs(KEYS) do
    -- in a list, false becomes nil in the reply
    answers[n] = held_by(lock, ARGV[2 * n - 1]) and 1
end

-- publish first: if PUBLISH is denied, nothing is written. No other client runs before this script ends
for n, held in ipairs(answers) do
    local channel = ARGV[2 * n]
    if held and channel ~= '' then redis.call('publish', channel, '0') end
end
-- other fields are not ours to delete; the record goes with its last field
for n, lock in ipairs(KEYS) do
    if answers[n] then redis.call('hdel', lock, ARGV[2 * n - 1]) end
end
return answers
