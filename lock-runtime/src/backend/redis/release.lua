-- Frees a lock that nobody waits for.
-- KEYS[1] the lock; ARGV[1] token
-- Reply 1 if it was the token's; otherwise 0, and line.lua has to look: it is marked, or not ours
if redis.pcall('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
