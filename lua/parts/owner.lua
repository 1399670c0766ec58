-- parts/owner: whether a field names an owner: the client's UUID (36 characters, a dash at the 9th), ":" and the task.
local function is_owner(field)
    return string.byte(field, 9) == 45 and string.byte(field, 37) == 58
end
