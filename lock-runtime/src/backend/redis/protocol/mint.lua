-- Mints fences for locks that their owners hold. Takes none, as a lock may have been released when this arrives.
-- KEYS the locks, then the fence counter; ARGV the values of the locks
-- Reply as of acquire.lua, with -1 for a lock that its owner does not hold
local first, each = mint(KEYS[#KEYS], #ARGV, 1)
local replies = {each}
for i, value in ipairs(ARGV) do
  local holder = redis.pcall('GET', KEYS[i])
  local is_own = type(holder) == 'string' and string.sub(holder, 1, 32) == string.sub(value, 1, 32)
  replies[i + 1] = is_own and first + i - 1 or -1
end
return replies
