-- Reserves `count` fences of the counter. Returns the first one and their number, `first:count`, or '' without a counter.
-- Runs before any key is written, so that an error here leaves nothing behind.
-- After the loss of the counter the server's clock keeps fences increasing; the counter does if the clock steps back.
local function mint(counter, count)
  if not counter then return '' end
  local time = redis.call('TIME')
  local last = tonumber(redis.call('GET', counter) or '0') or 0
  -- A greater number is no fence of this library, and a double cannot count on from it.
  if not (last < 9007199254740991) then last = 0 end
  local now = time[1] * 1000000 + time[2]
  -- While the counter is ahead of the clock, the clock could not replace it after a loss.
  if last >= now then count = 1 end
  local first = math.max(last + 1, now)
  redis.call('SET', counter, string.format('%.0f', first + count - 1))
  return string.format('%.0f:%.0f', first, count)
end

