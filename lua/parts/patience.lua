-- parts/patience: how long one side of a read-write lock waits for the other's turn, in milliseconds, from the first who is held
-- back on: those whose turn it is may be dead.
local PATIENCE = 2000
