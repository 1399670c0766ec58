-- parts/renew_each: renews each KEYS[n] for its owner, ARGV[2n-1], and its lease, ARGV[2n].
local answers, fit = {}, #ARGV == 2 * #KEYS
for n = 1, #KEYS do
    fit = fit and string.find(ARGV[2 * n], '^[1-9]%d*$')
end
if not fit then
    return redis.error_reply('ERR nestlock: renew needs an owner and a lease of at least 1 for each lock')
end

-- never shortens a TTL, and adds none to a record without. An unchanged TTL is written all the same: from Redis 7.2 on, WAIT
-- only waits for what this connection has written
local function lengthen(lock, ttl, lease)
    if ttl ~= -1 then redis.call('pexpire', lock, ttl < tonumber(lease) and lease or ttl) end
end

-- `renew` returns the result for one lock
local function renew_each(renew)
    for n, lock in ipairs(KEYS) do
        -- pcall: one bad record must not stop the renewal of the others
        local done, answer = pcall(renew, lock, ARGV[2 * n - 1], ARGV[2 * n])
        if done then
            answers[n] = answer
        elseif string.find(answer.err or answer, 'WRONGTYPE', 1, true) then
            answers[n] = -1
        elseif #KEYS == 1 then
            return redis.error_reply(answer.err or answer)
        else
            answers[n] = -2
        end
    end
    return answers
end
