-- parts/available: a semaphore's message. Redisson reads the number available: it wakes that many. nestlock counts the zeros
-- before it, one for each permit that was given back: of releases close together, each would say those of the others again.
-- `in_line`: of fair permits, too, whose waiters sleep through such messages, because each gets one of its own.
local function available(number, given)
    return given < 100 and string.rep('0', given) .. number or number
end
