-- Takes all keys for one owner, or none. An owner who has them already gets them again: a retry.
-- KEYS the locks, then the fence counter if a fence is wanted; ARGV token, ttl in ms, number of locks, how
-- many fences
-- Reply {1, first fence or ''} if granted, {0, ms until the holder's time is over or -1 if unknown} if busy
local locks = tonumber(ARGV[3])
local mine = {}
local free_in = 0
for i = 1, locks do
  local holder = redis.call('GET', KEYS[i])
  -- by the owner alone: others may have come to stand in line and left their mark
  if holder and string.sub(holder, 1, 32) == string.sub(ARGV[1], 1, 32) then
    mine[i] = holder
  elseif holder then
    local left = redis.call('PTTL', KEYS[i])
    if left < 0 or free_in < 0 then free_in = -1 else free_in = math.max(free_in, left, 1) end
  end
end
if free_in ~= 0 then return {0, free_in} end

local fence = mint(KEYS[locks + 1], ARGV[4])
for i = 1, locks do
  -- Never shorter: this may be a late request of one that wanted it for less time.
  local left = mine[i] and redis.call('PTTL', KEYS[i]) or 0
  redis.call('SET', KEYS[i], mine[i] or ARGV[1], 'PX', math.max(left, tonumber(ARGV[2])))
end
return {1, fence}
