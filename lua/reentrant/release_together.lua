-- reentrant/release_together: make this owner hold none of the locks. Safe to send twice.
--
-- KEYS[n]    lock     hash    owner -> hold count; its TTL is the lease
-- ARGV[1]    owner    string  "<client>:<task>"
-- ARGV[n+1]  channel  string  where waiters of KEYS[n] listen; empty: nobody does
-- Returns    list     what `release` answers for each lock, in order:
--            1        free now; waiters were told
--            nil      this owner does not hold it
--            error    of the server, if it refuses one of them: nothing was written
local owner, answers = ARGV[1], {}

if #ARGV ~= #KEYS + 1 then return redis.error_reply('ERR nestlock: release_together needs a channel for each lock') end

for n, lock in ipairs(KEYS) do
    local held, fields = redis.call('hget', lock, owner), redis.call('hlen', lock)
    -- a reader's field has the same name. In a list, false is answered as nil
    answers[n] = held and not (fields > 1 and redis.call('hexists', lock, 'mode') == 1) and 1
end

-- told first: where PUBLISH is refused, nothing is written. Nobody runs before this script ends
for n, held in ipairs(answers) do
    local channel = ARGV[n + 1]
    if held and channel ~= '' then redis.call('publish', channel, '0') end
end
-- other fields are not ours to delete; the last one takes the record along
for n, lock in ipairs(KEYS) do
    if answers[n] then redis.call('hdel', lock, owner) end
end
return answers
