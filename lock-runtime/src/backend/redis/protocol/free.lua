-- Frees one lock and leaves its wait queue alone. While a slot moves, the two may be at different servers, and only commands with
-- one key are served.
-- KEYS[1] the lock; ARGV[1] owner, [2] ms until the lock is free
-- Reply 1 if the owner held it, 0 if not
local holder = redis.pcall('GET', KEYS[1])
-- A key of another type is not held by this owner. Any other error leaves the holder unknown.
if type(holder) == 'table' and not string.find(holder.err, 'WRONGTYPE') then return holder end
-- Compare the owner alone: a claim of another owner may have added the contended mark.
if type(holder) ~= 'string' or string.sub(holder, 1, 32) ~= ARGV[1] then return 0 end
if ARGV[2] == '0' then redis.call('DEL', KEYS[1]) else redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 1
