-- parts/raises: whether an acquire raises the hold count: a late duplicate, sent before the last hold, must not lower it. What
-- is not a count, or has too many digits for one, counts as none.
local function raises(held, holds, digits)
    return not held or #held > digits or not string.find(held, '^%d+$') or tonumber(held) < tonumber(holds)
end
