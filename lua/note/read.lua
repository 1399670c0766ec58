-- note/read: the notes of some holders. Read-only.
--
-- KEYS[n]  note  string  as of note/write
-- Returns  list  what is there, for each; '' if there is nothing, or a key of another type
local texts = {}
for n, note in ipairs(KEYS) do
    local text = redis.pcall('get', note)
    -- a key of another type is no note
    if type(text) == 'table' and not string.find(text.err, 'WRONGTYPE', 1, true) then return text end
    texts[n] = type(text) == 'string' and text or ''
end
return texts
