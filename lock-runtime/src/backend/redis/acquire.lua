-- Takes all keys for one owner, or none. An owner who has them already gets them again: a retry.
-- KEYS the locks, then the fence counter if a fence is wanted; ARGV owner, ttl in ms, '1' for a fence
-- Reply {1, fence or ''} if granted, {0, ms until the holder's time is over or -1 if unknown} if busy
local locks = #KEYS
if ARGV[3] == '1' then locks = locks - 1 end

local free_in = 0
for i = 1, locks do
  local holder = redis.call('GET', KEYS[i])
  if holder and holder ~= ARGV[1] then
    local left = redis.call('PTTL', KEYS[i])
    if left < 0 or free_in < 0 then free_in = -1 else free_in = math.max(free_in, left, 1) end
  end
end
if free_in ~= 0 then return {0, free_in} end

-- Before anything is taken, so that an error here leaves nothing behind. The server's clock carries
-- the fence over the loss of the counter; the counter carries it over a clock that steps back.
local fence = ''
if ARGV[3] == '1' then
  local time = redis.call('TIME')
  local last = tonumber(redis.call('GET', KEYS[#KEYS]) or '0') or 0
  -- No fence of ours, and a double cannot count on from there.
  if not (last < 9007199254740991) then last = 0 end
  fence = string.format('%.0f', math.max(last + 1, time[1] * 1000000 + time[2]))
  redis.call('SET', KEYS[#KEYS], fence)
end

for i = 1, locks do
  redis.call('SET', KEYS[i], ARGV[1], 'PX', ARGV[2])
end
return {1, fence}
