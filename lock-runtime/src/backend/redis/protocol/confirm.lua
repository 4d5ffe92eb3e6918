-- Writes locks once more that one owner has, all or none, so that a WAIT behind it speaks of them too. Takes
-- none: it may arrive when they have been released. Never makes a lease shorter.
-- KEYS the locks; ARGV owner, ttl in ms
-- Reply 1 if all were the owner's; 0 if at least one was not, and nothing was changed
for i = 1, #KEYS do
  local holder = redis.call('GET', KEYS[i])
  if not holder or string.sub(holder, 1, 32) ~= ARGV[1] then return 0 end
end
for i = 1, #KEYS do
  redis.call('PEXPIRE', KEYS[i], math.max(redis.call('PTTL', KEYS[i]), tonumber(ARGV[2])))
end
return 1
