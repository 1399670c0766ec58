-- parts/patience: how long one side of a read-write lock yields to the other's turn, in milliseconds from the first waiter held
-- back. It is bounded because the waiters whose turn it is may be dead.
local PATIENCE = 2000
