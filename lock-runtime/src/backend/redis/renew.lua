-- Extends an owner's locks, all or none; never touches anybody else's.
-- KEYS the locks; ARGV owner, ttl in ms
-- Reply 1 if they were the owner's, 0 if at least one was not
for i = 1, #KEYS do
  local holder = redis.pcall('GET', KEYS[i])
  -- a key of another type is somebody else's; any other error says nothing about whose it is
  if type(holder) == 'table' and not string.find(holder.err, 'WRONGTYPE') then return holder end
  if holder ~= ARGV[1] then return 0 end
end
for i = 1, #KEYS do
  redis.call('PEXPIRE', KEYS[i], ARGV[2])
end
return 1
