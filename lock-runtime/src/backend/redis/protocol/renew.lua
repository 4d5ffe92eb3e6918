-- Extends leases, each all of its locks or none; never touches anybody else's.
-- KEYS the locks of all leases; ARGV ttl in ms, number of locks of each lease, then the owner of each
-- Reply a string of a digit for each lease: 1 if its locks were the owner's, 2 if so and others wait, 0 if at least
-- one was not. If there are errors a list of the same, in which the text of an error stands for some
local outcomes, has_errors = {}, false
local ttl, locks = ARGV[1], ARGV[2]
local first = 1
for lease = 1, #ARGV - 2 do
  local owner = ARGV[lease + 2]
  local outcome = 1
  for i = first, first + locks - 1 do
    local holder = redis.pcall('GET', KEYS[i])
    if type(holder) == 'table' then
      -- a key of another type is somebody else's; any other error says nothing about whose it is
      outcome = string.find(holder.err, 'WRONGTYPE') and 0 or holder.err
      has_errors = has_errors or outcome ~= 0
      break
    end
    -- by the owner alone: others may have come to stand in line and left their mark
    if not holder or string.sub(holder, 1, 32) ~= owner then
      outcome = 0
      break
    end
    if #holder == 50 then outcome = 2 end
  end
  if outcome == 1 or outcome == 2 then
    for i = first, first + locks - 1 do
      redis.call('PEXPIRE', KEYS[i], ttl)
      -- Whoever writes a key is told of its changes no more; who reads it is.
      redis.call('GET', KEYS[i])
    end
  end
  outcomes[lease] = outcome
  first = first + locks
end
-- Of hundreds of leases, one string is read in far less time than a list.
return has_errors and outcomes or table.concat(outcomes)
