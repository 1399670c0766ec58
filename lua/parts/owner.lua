-- parts/owner: whether a field is an owner's: the client's 36 characters, the first dash at the ninth, ":" and its task.
local function is_owner(field)
    return string.byte(field, 9) == 45 and string.byte(field, 37) == 58
end
