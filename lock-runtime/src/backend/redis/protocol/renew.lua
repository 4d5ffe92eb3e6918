-- Extends leases, each with all of its locks or none; never changes a lock of another owner.
-- KEYS the locks of all leases; ARGV ttl in ms, number of locks of each lease, then the owner of each
-- Reply a string of one digit per lease: 1 if held, 2 if held and contended, 0 if at least one lock was not held.
-- If there are errors, a list of the same, in which the text of an error stands for some leases
local outcomes, has_errors = {}, false
local ttl, locks = ARGV[1], ARGV[2]
local first = 1
for lease = 1, #ARGV - 2 do
  local owner = ARGV[lease + 2]
  local outcome = 1
  for i = first, first + locks - 1 do
    local holder = redis.pcall('GET', KEYS[i])
    if type(holder) == 'table' then
      -- A key of another type is not held by this owner. Any other error leaves the holder unknown.
      outcome = string.find(holder.err, 'WRONGTYPE') and 0 or holder.err
      has_errors = has_errors or outcome ~= 0
      break
    end
    -- Compare the owner alone: a claim of another owner may have added the contended mark.
    if not holder or string.sub(holder, 1, 32) ~= owner then
      outcome = 0
      break
    end
    if string.sub(holder, 50, 50) == '+' then outcome = 2 end
  end
  if outcome == 1 or outcome == 2 then
    for i = first, first + locks - 1 do
      redis.call('PEXPIRE', KEYS[i], ttl)
      -- A write ends the tracking of a key for its connection, and a read starts it again.
      redis.call('GET', KEYS[i])
    end
  end
  outcomes[lease] = outcome
  first = first + locks
end
-- For hundreds of leases, a client reads one string much faster than a list.
return has_errors and outcomes or table.concat(outcomes)
