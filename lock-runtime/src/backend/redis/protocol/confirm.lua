-- Writes locks of one owner once more, all or none, so that a WAIT behind it covers them. Takes no lock, as the locks may
-- have been released when it arrives. Never shortens a lease.
-- KEYS the locks; ARGV owner, ttl in ms
-- Reply 1 if the owner held all locks; 0 if at least one was not held, and nothing was changed
for i = 1, #KEYS do
  local holder = redis.call('GET', KEYS[i])
  if not holder or string.sub(holder, 1, 32) ~= ARGV[1] then return 0 end
end
for i = 1, #KEYS do
  redis.call('PEXPIRE', KEYS[i], math.max(redis.call('PTTL', KEYS[i]), tonumber(ARGV[2])))
end
return 1
