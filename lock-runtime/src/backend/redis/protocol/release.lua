-- Frees a lock that nobody waits for.
-- KEYS[1] the lock; ARGV[1] token
-- Reply 1 if it was the token's; otherwise 0, and line.lua has to look: it is marked, or not ours
local holder = redis.pcall('GET', KEYS[1])
-- The last four digits name a channel of the server that stored the token, and the slot may have moved since.
local is_its = type(holder) == 'string' and #holder == #ARGV[1]
  and string.sub(holder, 1, 45) == string.sub(ARGV[1], 1, 45)
return is_its and redis.call('DEL', KEYS[1]) or 0
