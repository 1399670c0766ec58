-- parts/raises: whether an acquire raises a count: one that comes late, from before the last hold, takes none away. What is
-- no count, or has more digits than one may have, is none.
local function raises(held, holds, digits)
    return not held or #held > digits or not string.find(held, '^%d+$') or tonumber(held) < tonumber(holds)
end
