-- parts/owner: how the one field of a reentrant record begins: the client's 36 characters, then its task.
local OWNER = '^%x+%-%x+%-%x+%-%x+%-%x+:'
