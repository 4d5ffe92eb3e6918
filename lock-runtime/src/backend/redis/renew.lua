-- Extends an owner's locks, all or none; never touches anybody else's.
-- KEYS the locks; ARGV owner, ttl in ms
-- Reply 1 if they were the owner's, 0 if at least one was not
for i = 1, #KEYS do
  -- pcall: a key of another type is somebody else's
  if redis.pcall('GET', KEYS[i]) ~= ARGV[1] then return 0 end
end
for i = 1, #KEYS do
  redis.call('PEXPIRE', KEYS[i], ARGV[2])
end
return 1
