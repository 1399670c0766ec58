-- note/write: why an owner holds a lock, in which program, and since when. Keeps the note of a later hold. Safe to send twice.
--
-- KEYS[1]  note     string   the turn, a space, and the text
-- ARGV[1]  life     integer  milliseconds that it lasts, at least 1
-- ARGV[2]  turn     integer  which hold it is about; a later one has a higher number; 1 to 16 digits
-- ARGV[3]  text     string   three lines: since when, in milliseconds since 1970; "<application>:<host>:<process>"; why
-- Returns  1        written
--          -1       TAKEN: a later hold of this owner has its note here
local note, life, turn, text = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
if not string.find(life, '^[1-9]%d*$') or not string.find(turn, '^[1-9]%d*$') or #turn > 16 then
    return redis.error_reply('ERR nestlock: life and turn must be integers of at least 1')
end

local before = tonumber(string.match(redis.call('get', note) or '', '^%d+'))
if before and before > tonumber(turn) then return -1 end
redis.call('set', note, turn .. ' ' .. text, 'px', life)
return 1
