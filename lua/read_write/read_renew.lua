-- read_write/read_renew: let locks and their owners' holds live for at least `lease` from now. Safe to send twice.
--
-- KEYS[n]     lock   hash     mode -> read or write, reader -> hold count, writer:write -> hold count; has a TTL
-- ARGV[2n-1]  owner  string   who must hold KEYS[n]
-- ARGV[2n]    lease  integer  milliseconds, at least 1
-- Returns     list   for each lock, in order:
--             1      renewed; a longer TTL is left as it is
--             0      GONE: no such record
--             -1     TAKEN: the record is there, but this owner does not read
--             -2     UNKNOWN: the server refused this one; try again
--             error  of the server, if there is one lock only and it is refused
local answers, fit = {}, #ARGV == 2 * #KEYS

for n = 1, #KEYS do
    fit = fit and string.find(ARGV[2 * n], '^[1-9]%d*$')
end
if not fit then
    return redis.error_reply('ERR nestlock: renew needs an owner and a lease of at least 1 for each lock')
end

local function extend(key, lease)
    local ttl = redis.call('pttl', key)
    if ttl >= 0 and ttl < tonumber(lease) then redis.call('pexpire', key, lease) end
end

local function renew(lock, owner, lease)
    local held = redis.call('hexists', lock, 'mode') == 1 and redis.call('hget', lock, owner)
    if not held then return redis.call('exists', lock) == 1 and -1 or 0 end
    local mine = (string.find(lock, '{', 1, true) and lock or '{' .. lock .. '}') .. ':' .. owner .. ':rwlock_timeout:'
    -- a hold whose key is over is renewed with the others: its owner was never told that it ended
    if redis.call('exists', mine .. '1') == 0 then
        -- a write that needs no memory lets the next one pass on a server that is out of memory
        redis.call('hdel', lock, '')
        redis.call('set', mine .. '1', '1', 'PX', lease)
    end
    -- bounded: a damaged count must not keep the server busy
    for n = 1, math.min(tonumber(held), 99999) do extend(mine .. n, lease) end
    extend(lock, lease)
    return 1
end

for n, lock in ipairs(KEYS) do
    -- pcall: one bad record must not cost the others their renewal
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
