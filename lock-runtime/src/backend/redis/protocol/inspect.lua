-- Reads a lock and its wait queue. Changes nothing.
-- KEYS[1] the lock, [2] its wait queue, if it may be read; ARGV[1] how many queued tokens to return
-- Reply {value of the lock, ms until it expires or -1 if never or -2 if it is free, number of queued tokens or -1 if
-- unknown, then the first of them}
local left = redis.call('PTTL', KEYS[1])
local holder = left ~= -2 and redis.pcall('GET', KEYS[1]) or ''
if type(holder) == 'table' then
  -- A key of another type is no lock, and keeps all owners out.
  if not string.find(holder.err, 'WRONGTYPE') then return holder end
  holder = ''
end
local queued = KEYS[2] and redis.pcall('ZCARD', KEYS[2])
local reply = {holder, left, type(queued) == 'number' and queued or -1}
if reply[3] > 0 then
  local tokens = redis.pcall('ZRANGE', KEYS[2], 0, ARGV[1] - 1)
  for i = 1, #tokens do reply[3 + i] = tokens[i] end
end
return reply
