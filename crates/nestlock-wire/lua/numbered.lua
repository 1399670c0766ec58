-- parts/numbered: stands around every script as it is sent. ARGV ends with the request's number, and the reply names it.
local number = table.remove(ARGV)
local function script()
--SCRIPT
end

local reply = script()
-- a code in one integer with the number: a list would cost the server a buffer of its own
if not reply then return number * 16 + 7 end
if type(reply) == 'number' then return number * 16 + reply end
if not reply.err then table.insert(reply, 1, tonumber(number)) end
return reply
