-- Frees an uncontended lock.
-- KEYS[1] the lock; ARGV[1] token; one with a channel, of 49 bytes, has a space behind it
-- Reply 1 if the token held the lock; otherwise 0, and wait_queue.lua has to decide: the lock is contended or not held
local value = redis.pcall('GET', KEYS[1])
-- Behind the token of an uncontended lock follows nothing, or a space and a text about its owner.
local is_held = value == ARGV[1] or type(value) == 'string' and (string.sub(value, 1, 50) == ARGV[1]
  -- The last four digits name a channel of the server that stored the token, and the slot may have moved since.
  or #ARGV[1] == 50 and string.sub(value, 1, 45) == string.sub(ARGV[1], 1, 45)
    and (#value == 49 or string.sub(value, 50, 50) == ' '))
return is_held and redis.call('DEL', KEYS[1]) or 0
