-- note/erase: erase the note of a hold, unless a later hold has its own there. Safe to send twice.
--
-- KEYS[1]  note     string   as of note/write
-- ARGV[1]  turn     integer  which hold it is about
-- Returns  1        erased
--          nil      there is none, or that of another hold
local note, turn = KEYS[1], ARGV[1]

if string.match(redis.call('get', note) or '', '^%d+') ~= turn then return nil end
redis.call('del', note)
return 1
