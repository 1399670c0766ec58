-- The environment of scripts: the part of Lua's libraries that Redis 7.0 keeps, read-only, and `redis`.
--
-- Arguments: the table `redis`; a message handler that turns an error into the text of its reply; a function that turns
-- an error of `redis.call` into its text, and anything else into nil. Returns a function that runs a script.
local redis, handler, text_of = ...

local error, getmetatable, pairs, rawset, setmetatable, tostring = error, getmetatable, pairs, rawset, setmetatable, tostring
local environment, pcall, xpcall = _G, pcall, xpcall

local globals = {}
for name in ([[assert collectgarbage coroutine error gcinfo getmetatable ipairs load loadstring math next pairs pcall
        rawequal rawget rawset select setmetatable string table tonumber tostring type unpack xpcall
        _VERSION]]):gmatch('%S+') do
    globals[name] = environment[name]
end
globals.redis = redis
globals._G = environment

local readonly = {}
local function refuse() error('Attempt to modify a readonly table', 2) end
local function protect(table, index)
    setmetatable(table, {__index = index, __newindex = refuse, __metatable = false})
    readonly[table] = true
    return table
end

for _, name in pairs({'coroutine', 'math', 'redis', 'string', 'table'}) do
    globals[name] = protect({}, globals[name])
end
-- ('x'):upper() must not give access to the real table
local strings = getmetatable('')
strings.__index, strings.__metatable = globals.string, protect({}, {__index = globals.string})

function globals.rawset(table, key, value)
    if readonly[table] then error('Attempt to modify a readonly table', 0) end
    return rawset(table, key, value)
end

function globals.setmetatable(table, meta)
    if readonly[table] then error('Attempt to modify a readonly table', 0) end
    return setmetatable(table, meta)
end

-- a script that catches an error of redis.call gets its text
local function caught(ok, ...)
    if ok then return ok, ... end
    local what = ...
    return ok, text_of(what) or what
end

function globals.pcall(...)
    return caught(pcall(...))
end

function globals.xpcall(called, handle)
    return xpcall(called, function(what)
        local text = text_of(what)
        return handle(text and {err = text} or what)
    end)
end

for name in pairs(environment) do environment[name] = nil end
setmetatable(globals, {
    __index = function(_, name)
        error("Script attempted to access nonexistent global variable '" .. tostring(name) .. "'", 2)
    end,
})
protect(environment, globals)

return function(script, keys, argv)
    rawset(globals, 'KEYS', keys)
    rawset(globals, 'ARGV', argv)
    return xpcall(script, handler)
end
