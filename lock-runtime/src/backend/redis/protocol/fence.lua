-- Reserves fences for `grants` grants, at most `length` for each. Returns the first fence, and how many each has.
-- Runs before any key is written, so that an error here leaves nothing behind.
-- After the loss of the counter the server's clock keeps fences increasing; the counter does if the clock steps back.
local function mint(counter, grants, length)
  -- All of them are at most some `length` microseconds ahead of the clock, which replaces a lost counter.
  length = math.max(1, math.floor(length / grants))
  local time = redis.call('TIME')
  local now = time[1] * 1000000 + time[2]
  local last = tonumber(redis.call('SET', counter, now + grants * length - 1, 'GET') or '0') or 0
  -- A greater number is no fence of this library, and a double cannot count on from it.
  if last < now or not (last < 9007199254740991) then return now, length end
  -- While the counter is ahead of the clock, the clock could not replace it after a loss.
  redis.call('SET', counter, last + grants)
  return last + 1, 1
end

