-- parts/fewer: the count that a release leads to, `holds`, and the one count it may start from, `only` (nil: any).
local holds, only = ARGV[2], nil
if holds ~= '0' and not string.find(holds, '^[1-9]%d*$') then
    only, holds = string.match(holds, '^([1-9]%d*)>(%d+)$')
    if not only then return redis.error_reply('ERR nestlock: holds must be an integer of at least 0, or n>m') end
end
