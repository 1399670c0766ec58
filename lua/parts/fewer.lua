-- parts/fewer: to how many `holds` a release leads, and from how many `only`, if from no other count.
local holds, only = ARGV[2], nil
if holds ~= '0' and not string.find(holds, '^[1-9]%d*$') then
    only, holds = string.match(holds, '^([1-9]%d*)>(%d+)$')
    if not only then return redis.error_reply('ERR nestlock: holds must be an integer of at least 0, or n>m') end
end
