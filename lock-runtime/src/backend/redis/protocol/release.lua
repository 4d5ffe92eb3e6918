-- Frees an uncontended lock.
-- KEYS[1] the lock; ARGV[1] token
-- Reply 1 if the token held the lock; otherwise 0, and wait_queue.lua has to decide: the lock is contended or not held
local holder = redis.pcall('GET', KEYS[1])
-- The last four digits name a channel of the server that stored the token, and the slot may have moved since.
local is_held = type(holder) == 'string' and string.sub(holder, 1, 45) == string.sub(ARGV[1], 1, 45)
  -- Behind the token of an uncontended lock follows nothing, or a space and a text about its owner.
  and (#holder == #ARGV[1] or #ARGV[1] == 49 and string.sub(holder, 50, 50) == ' ')
return is_held and redis.call('DEL', KEYS[1]) or 0
