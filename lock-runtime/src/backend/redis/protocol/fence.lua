-- Sets aside `count` fences of the counter and returns the first and how many, `first:count`, or '' if there
-- is no counter. To be called
-- before anything is taken, so that an error here leaves nothing behind. The server's clock carries the
-- fence over the loss of the counter; the counter carries it over a clock that steps back.
local function mint(counter, count)
  if not counter then return '' end
  local time = redis.call('TIME')
  local last = tonumber(redis.call('GET', counter) or '0') or 0
  -- No fence of ours, and a double cannot count on from there.
  if not (last < 9007199254740991) then last = 0 end
  local now = time[1] * 1000000 + time[2]
  -- A counter that runs ahead of the clock could not be carried over its loss.
  if last >= now then count = 1 end
  local first = math.max(last + 1, now)
  redis.call('SET', counter, string.format('%.0f', first + count - 1))
  return string.format('%.0f:%.0f', first, count)
end

