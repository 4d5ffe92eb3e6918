-- Frees uncontended locks, each of an owner of its own.
-- KEYS the locks; ARGV the token of each; one with a channel, of 49 bytes, has a space behind it
-- Reply 1 if one lock was given and its token held it; otherwise a string with a digit for each lock: 1 if the token held it, or 0,
-- and wait_queue.lua has to decide: the lock is contended or not held

-- The usual case, in three quarters of the time: one lock.
if not ARGV[2] then
  local value, token = redis.pcall('GET', KEYS[1]), ARGV[1]
  if value == token or type(value) == 'string' and string.sub(value, 1, 50) == token then
    return redis.call('DEL', KEYS[1])
  end
end

local outcomes = {}
for i = 1, #ARGV do
  local value, token = redis.pcall('GET', KEYS[i]), ARGV[i]
  -- Behind the token of an uncontended lock follows nothing, or a space and a text about its owner.
  local is_held = value == token or type(value) == 'string' and (string.sub(value, 1, 50) == token
    -- The last four digits name a channel of the server that stored the token, and the slot may have moved since.
    or #token == 50 and string.sub(value, 1, 45) == string.sub(token, 1, 45)
      and (#value == 49 or string.sub(value, 50, 50) == ' '))
  outcomes[i] = is_held and redis.call('DEL', KEYS[i]) or 0
end
return table.concat(outcomes)
